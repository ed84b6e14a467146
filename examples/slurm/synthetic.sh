#!/bin/bash
# An MLP on synthetic numbers, two nodes with two CPU ranks each. It needs no data, no GPU and no download. In a minute
# it tests whether nodes, network and installation work.
#
#   sbatch synthetic.sh

#SBATCH --job-name=synthetic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# One core for each rank of the agent.
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

# shellcheck source=/dev/null
source "${VENV:-$HOME/paceline/.venv}/bin/activate"

export PYTHONUNBUFFERED=1
export PACELINE_START=agent
# The agents authenticate to each other with this secret.
PACELINE_RUN_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export PACELINE_RUN_SECRET

srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -P -m paceline train synthetic-mlp --device cpu \
    --processes "$SLURM_CPUS_PER_TASK" \
    --output-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto "$@"
