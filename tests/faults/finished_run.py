"""Constants of the run that `conftest.py` trains."""

from __future__ import annotations

FLAGS = ("--save-steps=4", "--keep-last=4")
STEPS = [18, 16, 12, 9]
NEWEST, BEFORE = "step-00000018", "step-00000016"
DAMAGED = 4  # the exit code
