#!/bin/bash
# ResNet-18 on CIFAR-10 on two nodes with eight GPUs each: sixteen ranks.
#
#   sbatch multi-node.sh
#   sbatch --nodes=3 multi-node.sh --global-batch-size 1536     # the batch must be divisible by the number of ranks

#SBATCH --job-name=cifar10-multi-node
#SBATCH --nodes=2
# One agent per node. The agents connect through Slurm's variables: you need no address, port or world size.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=09:00:00
#SBATCH --signal=USR1@120
# After a node failure the job is requeued, too. It resumes from its newest checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

# Change this: modules, and the folder of paceline, which must be the same on all nodes.
# shellcheck source=/dev/null
source "${VENV:-$HOME/paceline/.venv}/bin/activate"

export PYTHONUNBUFFERED=1
export PACELINE_START=agent
# The agents authenticate to each other with this secret.
PACELINE_RUN_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export PACELINE_RUN_SECRET

# --kill-on-bad-exit: an agent that has lost the others would wait forever.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -P -m paceline train cifar10-resnet18 \
    --data-dir "${DATA:-data}" --global-batch-size 1024 \
    --processes "$SLURM_GPUS_ON_NODE" \
    --output-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto "$@"
