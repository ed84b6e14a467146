#!/bin/bash
# Fine-tune VGG19 on CIFAR-10 on the four GPUs of one node.
#
#   sbatch single-node.sh
#   DATA=/scratch/$USER/data sbatch single-node.sh --epochs 3 --weights none     # more flags of paceline train

#SBATCH --job-name=cifar10-vgg19
#SBATCH --nodes=1
# One task: an agent that starts one rank per GPU, and restarts the ranks if one fails.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
# For the agent and its ranks: one core per rank, and eight per rank for threads that decode pictures.
#SBATCH --cpus-per-task=36
#SBATCH --time=02:00:00
# Two minutes before the time limit the run saves, ends and is requeued.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

# Change this: modules, and the folder of paceline.
# module load cuda
# shellcheck source=/dev/null
source "${VENV:-$HOME/paceline/.venv}/bin/activate"

export PYTHONUNBUFFERED=1 # write lines to the log at once
export PACELINE_START=agent

# The job's number is in the folder's name, so that a requeued job finds its own checkpoints.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -P -m paceline train cifar10-vgg19 \
    --data-dir "${DATA:-data}" --global-batch-size 512 --epochs 30 --num-workers 8 --keep-every-epochs 5 \
    --processes "$SLURM_GPUS_ON_NODE" \
    --output-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto "$@"
