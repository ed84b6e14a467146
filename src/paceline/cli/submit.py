"""`paceline submit slurm` and `paceline submit kubernetes`."""

from __future__ import annotations

from paceline.cli import submit_kubernetes, submit_slurm

COMMANDS = (*submit_slurm.COMMANDS, *submit_kubernetes.COMMANDS)
