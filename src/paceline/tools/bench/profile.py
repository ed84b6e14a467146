"""Records a few training steps with torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.metrics.profile import Operator, Recording, file_of
from paceline.parallel.collectives import wait_for_all
from paceline.runtime.detect import World
from paceline.tools.bench.data import endless_batches
from paceline.tools.bench.step import take_step
from paceline.training.components import Components

_WARM_UP_STEPS, _STEPS = 3, 10


@dataclass(frozen=True)
class ProfileResult:
    """The operators are those of rank 0."""

    folder: str
    files: tuple[str, ...]  # by rank
    steps: int
    top: tuple[Operator, ...]


def profile_steps(components: Components, world: World, folder: Path, *, steps: int = _STEPS) -> ProfileResult:
    """Collective. Batches come from the pipeline, as in training. Weights do not change."""
    batches = endless_batches(components)
    for _ in range(_WARM_UP_STEPS):
        take_step(components.step, next(batches))
    wait_for_all(world)
    recording = Recording(world.device)
    observers = components.step.guards.observers
    observers.append(lambda phase, _: recording.mark(phase))
    recording.begin()
    for _ in range(steps):
        recording.mark("data")
        take_step(components.step, next(batches))
    recording.end()
    observers.clear()
    recording.write(folder / file_of(world.rank))
    wait_for_all(world)
    files = tuple(file_of(rank) for rank in range(world.world_size))
    # This takes seconds, and only one rank prints the table.
    top = recording.top_operators() if world.is_primary else ()
    return ProfileResult(str(folder), files, steps, top)
