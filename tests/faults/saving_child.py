"""A process that saves one checkpoint after the other until it is killed.

    python saving_child.py FOLDER sync|async FIRST_STEP

It says `saving N` on its stdout before a save and `saved N` when that is committed. All values of a checkpoint are
its step, so that one put together from two can be told.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch

from harness.ranks import make_world
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention

ITEMS = 1_250_000  # 5 MB each of four tensors


def main(folder: Path, mode: str, first_step: int) -> None:
    retention = Retention(keep_last=2, keep_best=1)
    manager = CheckpointManager(
        folder, make_world(0, 1), is_sharded=False, retention=retention, is_async=mode == "async"
    )
    tensors = {kind: {name: torch.empty(ITEMS) for name in ("a", "b")} for kind in ("model", "optimizer")}
    for step in count(first_step):
        for part in tensors.values():
            for tensor in part.values():
                tensor.fill_(step)
        # Every third is better than all before: `best` moves too, and old ones are dropped.
        validation = {"accuracy": float(step), "loss": 1.0} if step % 3 == 0 else None
        state = {"step": step, "keep": False, "validation": validation}
        print(f"saving {step}", flush=True)
        manager.save(tensors, state, {"step": step}, is_best=validation is not None)
        manager.wait()
        print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
