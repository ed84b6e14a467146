# hint: not-every-step-saved
# Saves every second step only.
"""Lesson 8: checkpoints and crashes. Fill the gaps, then: paceline course check 8

The check stops your code after every file operation, by a kill and by a power failure, and resumes it.
"""

import io
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

State = dict[str, Tensor]  # here {"weights": ..., "momentum": ...}: the model's and the optimizer's


def pack(step: int, state: State) -> bytes:
    """The content of a checkpoint."""
    content = io.BytesIO()
    torch.save({"step": step, **state}, content)
    return content.getvalue()


def save(folder: Path, step: int, state: State, rank: int) -> None:
    """Called by every rank. At each moment, `folder` holds one complete checkpoint or none."""
    if rank != 0:
        return
    temporary = folder / "latest.tmp"
    with temporary.open("wb") as file:
        file.write(pack(step, state))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "latest.pt")


def load_latest(folder: Path) -> tuple[int, State] | None:
    """The saved step and its state, or None if nothing was saved."""
    path = folder / "latest.pt"
    if not path.exists():
        return None
    content = torch.load(path, weights_only=True)  # never runs code from the file
    step = content.pop("step")
    return step, content


def train(folder: Path, last_step: int, state: State, take_step: Callable[[int, State], None], rank: int) -> State:
    """Steps 1 to last_step, or the remaining ones. take_step changes `state` in place; save after each step."""
    done = 0
    saved = load_latest(folder)
    if saved is not None:
        done, state = saved
    for step in range(done + 1, last_step + 1):
        take_step(step, state)
        if step % 2 == 0:
            save(folder, step, state, rank)
    return state
