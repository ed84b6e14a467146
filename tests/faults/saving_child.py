"""A process that is killed while it saves. It reports its progress to its parent through a pipe.

All values of a checkpoint are its step, so a mixture of two checkpoints is detected.
"""

from __future__ import annotations

import signal
import threading
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from harness.ranks import make_world
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention

Payload = dict[str, dict[str, torch.Tensor]]


def make_payload(items: int) -> Payload:
    return {kind: {name: torch.empty(items) for name in ("a", "b")} for kind in ("model", "optimizer")}


def save(manager: CheckpointManager, payload: Payload, step: int, parent: Connection) -> None:
    for part in payload.values():
        for tensor in part.values():
            tensor.fill_(step)
    # Every third checkpoint is the best so far: `best` moves too, and old checkpoints are dropped.
    validation = {"accuracy": float(step), "loss": 1.0} if step % 3 == 0 else None
    state = {"step": step, "keep": False, "validation": validation}
    parent.send(("saving", step))
    manager.save(payload, state, {"step": step}, is_best=validation is not None)
    manager.wait()
    parent.send(("saved", step))


def open_manager(folder: str, *, is_async: bool) -> CheckpointManager:
    torch.set_num_threads(1)
    retention = Retention(keep_last=2, keep_best=1)
    return CheckpointManager(Path(folder), make_world(0, 1), is_sharded=False, retention=retention, is_async=is_async)


def save_for_ever(folder: str, is_async: bool, first_step: int, parent: Connection) -> None:
    """Save one checkpoint after the other, 20 MB each."""
    manager, payload = open_manager(folder, is_async=is_async), make_payload(1_250_000)
    for step in count(first_step):
        save(manager, payload, step, parent)


def save_when_asked_to_stop(folder: str, is_async: bool, first_step: int, parent: Connection) -> None:
    """Train until SIGTERM, then save 64 MB and end, like a stop request."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    manager, payload = open_manager(folder, is_async=is_async), make_payload(4_000_000)
    if first_step == 1:
        save(manager, payload, first_step, parent)
    parent.send(("training", first_step))
    asked.wait()
    save(manager, payload, first_step + 1, parent)
