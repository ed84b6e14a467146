#!/bin/bash
# ResNet-18 on CIFAR-10 on two nodes with eight GPUs each: sixteen ranks, one answer.
#
#   sbatch multi-node.sh
#   sbatch --nodes=3 multi-node.sh --global-batch-size 1536     # the batch must fall into equal parts

#SBATCH --job-name=cifar10-multi-node
#SBATCH --nodes=2
# One agent per node. They find each other by Slurm's own variables: no address, port or world size to fill in.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=09:00:00
#SBATCH --signal=USR1@120
# The loss of a node, too, brings the job back into the queue; it goes on from its newest checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

# Your own: modules, and where paceline is installed. The folder must be the same on all nodes.
source "${VENV:-$HOME/paceline/.venv}/bin/activate"

export PYTHONUNBUFFERED=1
export PACELINE_START=agent
# The agents prove to each other that they belong to this job.
export PACELINE_RUN_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

# --kill-on-bad-exit: an agent that has lost its peers would wait for nothing.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -m paceline train cifar10-resnet18 \
    --data-dir "${DATA:-data}" --global-batch-size 1024 \
    --processes "$SLURM_GPUS_ON_NODE" \
    --output-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto "$@"
