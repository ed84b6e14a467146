"""Measures the training step alone, on a batch that is already on the device: its speed and its phases.

Every rank also runs the same step without exchange. The difference is exposed communication, and waiting for slower
ranks. `profile_steps` records a few steps with torch's profiler.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from paceline.data.loader import Batch
from paceline.metrics.ceiling import count_flops, measure_matmul_flops, name_precision
from paceline.metrics.profile import Operator, Recording, file_of
from paceline.metrics.timing import (
    Rounds,
    Work,
    choose_rounds,
    gather_numbers,
    mean_over_ranks,
    synchronise,
    time_rounds,
)
from paceline.models.registry import build_model
from paceline.parallel.apply import parallelise
from paceline.parallel.collectives import wait_for_all
from paceline.runtime.detect import World
from paceline.runtime.seeds import seed_initial_weights
from paceline.tools.bench.data import endless_batches
from paceline.training.components import Components
from paceline.training.guards import Guards
from paceline.training.optim import MovingAverage, build_optimizer
from paceline.training.step import TrainStep

_BLOCK, _LEAST_BLOCKS = 3, 3  # steps per block, and blocks; kinds alternate, so changes of the machine affect all
_READ_AHEAD = 3  # batches that may be ready after a pause, which training does not have
_PHASE_STEPS = 5


@dataclass(frozen=True)
class StepResult:
    """Measurements of one rank while all ranks step together."""

    steps: int
    rank_batch_size: int
    precision: str
    num_parameters: int
    gradient_bytes: int  # exchanged per step, once
    step_s: float  # median
    step_p95_s: float
    samples_per_s: float  # all ranks together
    loop_s: float  # the same with the data pipeline, as in training
    data_s: float  # the time that the pipeline adds
    forward_s: float
    backward_s: float  # with the exchange of gradients and their norm
    update_s: float
    alone_s: float | None  # the same step without peers; None on one rank, or if it does not fit in memory
    exposed_s: float | None  # exposed communication
    flops: int | None  # of a rank's step; None if the model cannot be counted
    flops_per_s: float | None
    ceiling_flops_per_s: float  # of a large matrix product in the same precision, all ranks at once
    note: str = ""

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation: the share of the ceiling that the step reaches."""
        return None if self.flops_per_s is None else self.flops_per_s / self.ceiling_flops_per_s


@dataclass(frozen=True)
class Blocks:
    """Rounds of one kind of work, in blocks that alternate with other kinds."""

    blocks: tuple[Rounds, ...]

    @property
    def all(self) -> Rounds:
        return Rounds(tuple(seconds for block in self.blocks for seconds in block.seconds))

    def longer_than(self, other: Blocks) -> float:
        """Difference in seconds per round, from adjacent blocks: other load slows both. Never negative."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return max(0.0, statistics.median(mine.median_s - theirs.median_s for mine, theirs in pairs))


def measure_step(components: Components, world: World, *, seconds: float = 6.0) -> StepResult:
    """Collective. Weights do not change: the learning rate is 0, the arithmetic is the same."""
    batch = next(endless_batches(components))
    dtype = components.model.autocast_dtype or torch.float32
    wait_for_all(world)
    ceiling = _mean(measure_matmul_flops(world.device, dtype), world)
    lonely, note = _build_lonely_step(components, world)
    works: list[tuple[Work, int]] = [
        (partial(take_step, components.step, batch), 0),
        (_loop_of(components), _READ_AHEAD),
    ]
    works += [(partial(take_step, lonely, batch), 0)] if lonely else []
    together, loop, *others = _take_turns(works, world, seconds)
    alone = others[0] if others else None
    forward_s, backward_s, update_s = _time_phases(components.step, batch, world)
    count = count_flops(components.plan.config.model, components.plan.largest_shape, components.plan.info.num_classes)
    flops = count.per_sample * components.plan.rank_batch_size if count.per_sample else None
    parameters = [p for p in components.model.module.parameters() if p.requires_grad]
    note = "; ".join(filter(None, [note, count.note]))
    times = together.all
    return StepResult(
        steps=times.count,
        rank_batch_size=components.plan.rank_batch_size,
        precision=name_precision(dtype, world.device),
        num_parameters=components.num_parameters,
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters),
        step_s=times.median_s,
        step_p95_s=times.p95_s,
        samples_per_s=components.plan.config.train.global_batch_size / times.median_s,
        loop_s=loop.all.median_s,
        data_s=loop.longer_than(together),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        alone_s=alone.all.median_s if alone else None,
        exposed_s=together.longer_than(alone) if alone else None,
        flops=flops,
        flops_per_s=flops / times.median_s if flops else None,
        ceiling_flops_per_s=ceiling,
        note=note,
    )


def take_step(step: TrainStep, batch: Batch) -> None:
    report = step.gradients(batch, 0, wants_stop=False)
    step.guards.enter("update", 1)
    step.update(0, 0.0, report)


def _loop_of(components: Components) -> Work:
    """A step on the next batch, as in the training loop."""
    batches = endless_batches(components)
    return lambda: take_step(components.step, next(batches))


def _build_lonely_step(components: Components, world: World) -> tuple[TrainStep | None, str]:
    """The rank's share of the step, as in a run of one rank; or None and the reason."""
    if world.world_size == 1:
        return None, ""
    plan, config = components.plan, components.plan.config
    parallel = dataclasses.replace(
        config.parallel, strategy="single", cpu_offload=False, lanes=components.step.lanes_per_rank
    )
    config = dataclasses.replace(config, parallel=parallel)
    nobody_else = dataclasses.replace(world, rank=0, world_size=1, local_world_size=1)
    seed_initial_weights(config.train.seed)
    fits = 1.0
    lonely = None
    try:
        model = build_model(config.model, plan.input_shape, plan.info.num_classes, load_weights=False)
        whole = parallelise(model, config, nobody_else)
        optimizer = build_optimizer(config.optim, whole.module)
        average = MovingAverage(whole.module, config.optim.ema_decay) if config.optim.ema_decay else None
        lonely = TrainStep(whole, optimizer, average, config, nobody_else, Guards())
        take_step(lonely, next(endless_batches(components)))
    except torch.OutOfMemoryError:  # a sharded model may not fit on one rank
        fits = 0.0
    if min(row[0] for row in gather_numbers([fits], world)) < 1.0:
        return None, "the step without peers does not fit in a rank's memory"
    return lonely, ""


def _take_turns(works: Sequence[tuple[Work, int]], world: World, seconds: float) -> list[Blocks]:
    """Time each kind of work, block by block. The number is how many rounds to skip before each block."""
    rounds = min(choose_rounds(work, world, seconds / len(works)) for work, _ in works)
    found: list[list[Rounds]] = [[] for _ in works]
    for _ in range(max(_LEAST_BLOCKS, rounds // _BLOCK)):
        for (work, passed), blocks in zip(works, found, strict=True):
            wait_for_all(world)
            time_rounds(work, world.device, passed)
            blocks.append(mean_over_ranks(time_rounds(work, world.device, _BLOCK), world))
    return [Blocks(tuple(blocks)) for blocks in found]


class _PhaseClock:
    """Records the phases of a step, and synchronises with the device at each."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0, "reduce": 0.0, "update": 0.0}
        self._device = device
        self._phase = ""
        self._since = 0.0

    def enter(self, phase: str, step: int) -> None:
        synchronise(self._device)
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def stop(self) -> None:
        self.enter("", 0)


def _time_phases(step: TrainStep, batch: Batch, world: World) -> tuple[float, float, float]:
    """Mean seconds over ranks of forward, backward (with the exchange) and update."""
    clock = _PhaseClock(world.device)
    step.guards.observers.append(clock.enter)
    wait_for_all(world)
    for _ in range(_PHASE_STEPS):
        take_step(step, batch)
        clock.stop()
    step.guards.observers.remove(clock.enter)
    found = clock.seconds
    forward, backward, update = found["forward"], found["backward"] + found["reduce"], found["update"]
    rows = gather_numbers([forward, backward, update], world)
    forward, backward, update = (sum(column) / world.world_size / _PHASE_STEPS for column in zip(*rows, strict=True))
    return forward, backward, update


def _mean(value: float, world: World) -> float:
    return sum(row[0] for row in gather_numbers([value], world)) / world.world_size


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
