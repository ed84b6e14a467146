"""Record a few steps of a run with torch's profiler: a trace per rank for Perfetto, and a table of operators.

The profiler is called at every phase that a rank enters and needs no line in the loop. It does not change results, but
it costs time: recorded steps are not part of the run's timing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.metrics.phases import PhaseClock
from paceline.metrics.screen import format_time
from paceline.metrics.timing import synchronise
from paceline.parallel.collectives import wait_for_all
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runtime.detect import World

_log = logging.getLogger("paceline")
PROFILE_FOLDER = "profile"
_WARM_UP_STEPS, _STEPS, _TOP = 10, 10, 10
_ENOUGH_STEPS = 3  # if the epoch ends before ten steps are recorded
_MARKS = ("data", "forward", "backward", "reduce", "update")  # the phases of a step, as labels in the trace
_NAME_WIDTH = 48


@dataclass(frozen=True)
class Operator:
    """All calls of one operator, without the operators it calls."""

    name: str
    calls: int
    seconds: float
    share: float  # of all operators' time


def file_of(rank: int) -> str:
    return f"rank-{rank}.json.gz"


class Recording:
    """A running torch profiler on this rank, with labels for the phases in its trace."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._is_cuda = device.startswith("cuda")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        self._profiler = profile(activities=activities, acc_events=True)  # of one cycle; without it torch warns
        self._mark: Any = None
        self._seconds = 0.0

    def begin(self) -> None:
        synchronise(self._device)
        self._profiler.start()
        self._seconds = -time.perf_counter()

    def mark(self, name: str) -> None:
        """Label the trace from here to the next mark."""
        self._end_mark()
        self._mark = record_function(name)
        self._mark.__enter__()

    def end(self) -> None:
        self._end_mark()
        synchronise(self._device)
        self._seconds += time.perf_counter()
        self._profiler.stop()

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        self._mark = None

    @property
    def seconds(self) -> float:
        return self._seconds

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))

    def top_operators(self) -> tuple[Operator, ...]:
        """Takes seconds, so only the rank that prints calls it."""
        return rank_operators(list(self._profiler.key_averages()), is_cuda=self._is_cuda)

    def device_busy_share(self) -> float | None:
        """The share of the recorded time in which the GPU ran kernels; None on a CPU."""
        if not self._is_cuda:
            return None
        return covered(_kernel_spans(self._profiler.events() or [])) / 1e6 / self._seconds


def rank_operators(events: Sequence[FunctionEventAvg], *, is_cuda: bool) -> tuple[Operator, ...]:
    """Operators by self time. On a GPU this is device time, and a kernel counts for the operator that launched it.

    A replayed CUDA graph launches no operators. Its kernels are listed instead.
    """
    found = _self_times(events, DeviceType.CPU, is_cuda=is_cuda)
    if is_cuda:
        kernels = _self_times(events, DeviceType.CUDA, is_cuda=True)
        if sum(seconds for _, _, seconds in found) < sum(seconds for _, _, seconds in kernels) / 2:
            found = kernels
    total = sum(seconds for _, _, seconds in found) or 1.0
    found.sort(key=lambda entry: -entry[2])
    return tuple(Operator(name, calls, seconds, seconds / total) for name, calls, seconds in found[:_TOP])


def _self_times(events: Sequence[FunctionEventAvg], kind: DeviceType, *, is_cuda: bool) -> list[tuple[str, int, float]]:
    """Name, calls and seconds of all events on this kind of device, without marks."""
    return [
        (str(event.key), event.count, (event.self_device_time_total if is_cuda else event.self_cpu_time_total) / 1e6)
        for event in events
        if event.device_type == kind and not _is_mark(event.key, event)
    ]


def _is_mark(name: str | None, event: FunctionEvent | FunctionEventAvg) -> bool:
    """On a GPU track a mark (also torch's own) is only the span of its kernels."""
    is_span = event.device_type == DeviceType.CUDA and bool(getattr(event, "is_user_annotation", False))
    return name in _MARKS or is_span


def _kernel_spans(events: Sequence[FunctionEvent]) -> list[tuple[float, float]]:
    """When kernels ran, in microseconds."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not _is_mark(event.name, event)
    ]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The total length that at least one span covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


# --- In a run


@dataclass(frozen=True)
class RunProfile:
    """The recorded profile. Operators and GPU share are those of the primary rank."""

    files: tuple[str, ...]  # by rank, in the folder
    first_step: int
    steps: int
    step_s: float  # measured while recording, which is slower
    device_busy_share: float | None
    top: tuple[Operator, ...]

    def to_json(self) -> dict[str, Any]:
        return {"folder": PROFILE_FOLDER, **asdict(self)}

    def table(self) -> str:
        """A text table, also for grep."""
        last = self.first_step + self.steps - 1
        lines = [f"steps {self.first_step} to {last} of rank 0, {format_time(self.step_s)} each while recorded"]
        if self.device_busy_share is not None:
            lines.append(f"the GPU ran kernels {self.device_busy_share:.0%} of the time")
        lines += ["", f"{'operator':<{_NAME_WIDTH}} {'self time':>10} {'share':>6} {'calls':>8}"]
        for operator in self.top:
            name = operator.name if len(operator.name) <= _NAME_WIDTH else operator.name[: _NAME_WIDTH - 1] + "~"
            time_text = format_time(operator.seconds)
            lines.append(f"{name:<{_NAME_WIDTH}} {time_text:>10} {operator.share:>6.0%} {operator.calls:>8,}")
        return "\n".join(lines) + "\n"


class StepProfiler:
    """Skips the first steps, records some steps, writes the profile, and then does nothing more."""

    def __init__(self, world: World, folder: RunFolder, before_write: Callable[[int], None]) -> None:
        self._world = world
        self._folder = folder
        self._before_write = before_write  # extends the watchdog's limit: writing may take seconds
        self._seen = 0  # steps begun in this attempt
        self._recording: Recording | None = None
        self._first_step, self._steps = 0, 0
        self.result: RunProfile | None = None

    def enter(self, phase: str, step: int, clock: PhaseClock) -> None:
        """Called before each phase. All ranks enter phases in the same order, so all record the same steps."""
        if self.result is not None:
            return
        is_new_step = phase == "data"
        self._seen += is_new_step
        if self._recording is not None:
            if phase in _MARKS and not (is_new_step and self._steps == _STEPS):
                self._steps += is_new_step
                self._recording.mark(phase)
                return
            self._end(clock, is_last_chance=phase == "finish")
        if self.result is None and is_new_step and self._seen > _WARM_UP_STEPS:
            clock.pause()
            self._first_step, self._steps = step, 1
            self._recording = Recording(self._world.device)
            self._recording.begin()
            self._recording.mark(phase)

    def _end(self, clock: PhaseClock, *, is_last_chance: bool) -> None:
        """Stop after ten steps or at the end of the epoch. With too few steps, try again in the next epoch."""
        recording, self._recording = self._recording, None
        assert recording is not None
        recording.end()
        if self._steps >= _ENOUGH_STEPS or is_last_chance:
            self._before_write(self._first_step + self._steps - 1)
            self.result = self._write(recording)
            wait_for_all(self._world)  # one rank writes more than the others
        clock.resume()

    def _write(self, recording: Recording) -> RunProfile:
        world = self._world
        folder = self._folder.profile
        found = RunProfile(
            files=tuple(file_of(rank) for rank in range(world.world_size)),
            first_step=self._first_step,
            steps=self._steps,
            step_s=recording.seconds / self._steps,
            device_busy_share=recording.device_busy_share() if world.is_primary else None,
            top=recording.top_operators() if world.is_primary else (),
        )
        try:
            recording.write(folder / file_of(world.rank))
            if world.is_primary:
                write_atomically(folder / "top.txt", found.table())
                for path in set(folder.glob("rank-*.json.gz")) - {folder / name for name in found.files}:
                    path.unlink()  # from an earlier attempt with more ranks
        except OSError as error:
            self._folder.warn_on_write_error(PROFILE_FOLDER, error)
        return found
