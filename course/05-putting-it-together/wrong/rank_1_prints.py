# hint: wrong-rank-prints
# Rank 0 is silent.
"""Lesson 5: putting it together, and the dry run. Fill the gaps, then: paceline course check 5

The check calls main() on two ranks with its own data set and training step.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist


def say(text: str) -> None:
    """Print once, not once per rank."""
    if dist.get_rank() == 1:
        print(text)


def prepare_once(path: Path, prepare: Callable[[Path], None]) -> None:
    """Rank 0 prepares the data (for example a download); no rank continues before it is ready."""
    if dist.get_rank() == 0:
        prepare(path)
    dist.barrier()


def dry_run(batches: Iterable[int], train_step: Callable[[int], float], steps: int) -> list[float]:
    """Only the first `steps` steps; a loss that is not finite raises ValueError."""
    losses = []
    for batch in itertools.islice(batches, steps):
        loss = train_step(batch)
        if not math.isfinite(loss):
            raise ValueError(f"step {len(losses) + 1} has loss {loss}")
        losses.append(loss)
    return losses


def main(
    path: Path,
    prepare: Callable[[Path], None],
    read: Callable[[Path], Iterable[int]],
    train_step: Callable[[int], float],
    steps: int,
) -> list[float]:
    """The whole order: group, data, batches, steps. The group is always closed, also after an error."""
    dist.init_process_group("gloo")
    try:
        prepare_once(path, prepare)
        losses = dry_run(read(path), train_step, steps)
        say(f"{steps} steps on {dist.get_world_size()} ranks, last loss {losses[-1]:.3f}")
        return losses
    finally:
        dist.destroy_process_group()
