"""A few training steps under torch's profiler: a trace per rank for Perfetto, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.bench.data import endless_batches
from paceline.bench.step import take_step
from paceline.metrics.timing import synchronise
from paceline.parallel.collectives import wait_for_all
from paceline.training.rig import Rig
from paceline.world.detect import World

_WARM_UP_STEPS, _STEPS, _TOP = 3, 10, 10
_OWN_MARKS = ("step", "data")  # what we add to the trace, to find one's way in it


@dataclass(frozen=True)
class Operator:
    """All calls of one operator, without what it called in turn."""

    name: str
    calls: int
    seconds: float
    share: float  # of all operators' time


@dataclass(frozen=True)
class ProfileResult:
    """The operators are the primary's."""

    folder: str
    files: tuple[str, ...]  # by rank
    steps: int
    top: tuple[Operator, ...]


def profile_steps(rig: Rig, world: World, folder: Path, *, steps: int = _STEPS) -> ProfileResult:
    """Collective. Batches come from the pipeline, as in training; weights stay what they are."""
    batches = endless_batches(rig)
    for _ in range(_WARM_UP_STEPS):
        take_step(rig.step, next(batches))
    is_cuda = world.device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    wait_for_all(world)
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            with record_function("data"):
                batch = next(batches)
            with record_function("step"):
                take_step(rig.step, batch)
        synchronise(world.device)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / _file_of(world.rank)))
    wait_for_all(world)
    files = tuple(_file_of(rank) for rank in range(world.world_size))
    # Seconds of adding up, for a table that only one rank prints.
    top = _top_operators(list(profiler.key_averages()), is_cuda=is_cuda) if world.is_primary else ()
    return ProfileResult(str(folder), files, steps, top)


def _file_of(rank: int) -> str:
    return f"rank-{rank}.json.gz"


def _top_operators(events: list[FunctionEventAvg], *, is_cuda: bool) -> tuple[Operator, ...]:
    """By the device's time on a GPU, where a kernel counts for the operator that launched it."""
    found = [
        (str(event.key), event.count, (event.self_device_time_total if is_cuda else event.self_cpu_time_total) / 1e6)
        for event in events
        if event.device_type == DeviceType.CPU and event.key not in _OWN_MARKS
    ]
    total = sum(seconds for _, _, seconds in found) or 1.0
    found.sort(key=lambda entry: -entry[2])
    return tuple(Operator(name, calls, seconds, seconds / total) for name, calls, seconds in found[:_TOP])
