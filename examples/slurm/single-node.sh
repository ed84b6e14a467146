#!/bin/bash
# Fine-tune VGG19 on CIFAR-10 on the four GPUs of one node.
#
#   sbatch single-node.sh
#   DATA=/scratch/$USER/data sbatch single-node.sh --epochs 3 --weights none     # further flags of paceline train

#SBATCH --job-name=cifar10-vgg19
#SBATCH --nodes=1
# One task: an agent that starts the ranks, one on each GPU, and starts them again when one dies.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
# For the agent and its ranks together: a core for each rank, and eight threads that decode its pictures.
#SBATCH --cpus-per-task=36
#SBATCH --time=02:00:00
# Two minutes before the limit the run saves, leaves, and goes back into the queue.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

# Your own: modules, and where paceline is installed.
# module load cuda
source "${VENV:-$HOME/paceline/.venv}/bin/activate"

export PYTHONUNBUFFERED=1 # lines reach the log when they are printed
export PACELINE_START=agent

# The folder carries the job's number, so that a requeued job finds its own checkpoints.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -m paceline train cifar10-vgg19 \
    --data-dir "${DATA:-data}" --global-batch-size 512 --epochs 30 --num-workers 8 --save-frequency 5 \
    --processes "$SLURM_GPUS_ON_NODE" \
    --output-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto "$@"
