#!/bin/bash
# The course script: one task per rank, one GPU per task. Options of sbatch override the lines below. Arguments after
# the script's name are passed to paceline train.
#
#   sbatch run.sh                                  # one node, four GPUs
#   sbatch --ntasks-per-node=1 run.sh              # one GPU
#   sbatch --nodes=2 run.sh                        # eight GPUs
#   sbatch --nodes=2 run.sh --strategy fsdp        # the same, sharded
#   sbatch --gpus-per-node=0 --cpus-per-task=1 run.sh --device cpu      # a cluster without GPUs

#SBATCH --job-name=course
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.log

set -euo pipefail

# shellcheck source=/dev/null
source "${VENV:-$HOME/paceline/.venv}/bin/activate"

export PYTHONUNBUFFERED=1

# Rank, world size and addresses come from srun's variables (SLURM_PROCID and others); export nothing.
# In a container: add --environment=./edf.toml, or --container-image and --container-mounts, and leave out the venv.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -P -m paceline train "${RECIPE:-cifar10-cnn}" \
    --data-dir "${DATA:-data}" --metric-lines \
    --output-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto "$@"
