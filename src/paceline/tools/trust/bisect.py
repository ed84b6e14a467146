"""Finds the first step at which two runs differ, where in this step, and the setting that causes it.

1. Stored checkpoints and the recorded numbers of every step say between which steps they begin to differ.
2. Both runs are replayed side by side from their last equal checkpoint, until a bit differs.
3. Both are replayed to the step before, and this step is compared sample by sample and layer by layer.
4. The first run is replayed with some settings of the second. Halving the settings finds the one that matters.

If both replays agree, settings and data are not the cause. The rest are code, packages and machines.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoints.capture import model_tensors
from paceline.checkpoints.difference import compare_step
from paceline.checkpoints.format import step_folders, step_of
from paceline.checkpoints.identity import SILENT
from paceline.data.fingerprint import differences
from paceline.errors import CheckpointError, DataError, PacelineError, UserError
from paceline.metrics.recorder import read_rows
from paceline.metrics.step_trace import UNKNOWN, Numbers, read_trace
from paceline.runs.comparison import RunRecord, compare_records, logged_losses, read_record
from paceline.runs.folder import RunFolder
from paceline.settings.schema import field_table, flatten
from paceline.settings.small_files import read_json_object
from paceline.settings.values import Setting, as_typed
from paceline.tools.trust.step_difference import (
    Place,
    digest_state,
    first_difference,
    first_tensor,
    state_of,
    trace_step,
)
from paceline.training.replay import Replay

# Settings that change no weights, besides those that checkpoints ignore.
_ASIDE = (
    *("log_frequency", "metric_lines", "async_save", "keep_last", "keep_best", "keep_every_epochs", "save_epochs"),
    *("save_steps", "best_is_latest", "init_from", "test_batch_size", "test_views", "stop_early", "num_workers"),
    *("rehearse", "processes", "strategy"),
)
_OF_DATA = ("dataset", "data_dir", "num_samples", "input_size", "num_classes", "image_size")
_ENVIRONMENT = {"packages": "package", "python": "package", "paceline": "code", "git": "code", "platform": "machine"}
_CLOSE = 1e-5  # relative: a mean over an interval is summed in another order here

State = tuple[int, ...]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Window:
    """What the folders say: the runs are equal up to `same`, and differ after `differs`."""

    same: int  # the last common checkpoint with equal tensors; 0: the start
    differs: int | None  # None: no difference is recorded
    end: int  # the last step that a replay has to take
    last_steps: tuple[int, int]  # of the two runs
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A difference between the runs that may be the cause."""

    kind: str  # flag, seed, data, package, code or machine
    name: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.first)} in A, {_shown(self.second)} in B"


@dataclass
class Bisection:
    """The answer."""

    window: Window
    step: int | None = None  # the first that differs; 0: the initial weights. None: the replays are equal
    place: Place | None = None
    causes: list[Candidate] = field(default_factory=list)
    is_cause_tried: bool = False  # by a replay: the first run with these settings gives the second
    notes: list[str] = field(default_factory=list)
    replays: int = 0

    @property
    def is_equal(self) -> bool:
        return self.window.differs is None and self.step is None


def bisect_runs(first: Path, second: Path, flags: Sequence[str] = (), tell: Tell = print) -> Bisection:
    """`flags`: of `paceline train`, for both replays, for example --data-dir."""
    records = [read_record(path, read_rows(RunFolder(path).metrics_jsonl)) for path in (first, second)]
    window = find_window(*records)
    found = Bisection(window)
    if window.differs is None:
        return found
    for line in window.lines:
        tell(line)
    _require_same_data(records, window)
    with Replay(first, flags) as a, Replay(second, flags) as b:
        try:
            work = _Work(a, b, window, found, tell)
            work.find()
        except (CheckpointError, DataError) as error:
            raise _cannot_replay(error, window) from error
    if found.step is None:
        found.causes = _other_causes(first, second)
        found.notes += _who_deviates(records, work)
    return found


# --- What the folders say


def find_window(first: RunRecord, second: RunRecord) -> Window:
    stored = [{step_of(path) for path in step_folders(record.path / "checkpoints")} for record in (first, second)]
    common = sorted(stored[0] & stored[1])
    # Equal at one step means equal at all steps before it, so halving finds the first that differs.
    place = bisect_left(common, True, key=lambda step: not _is_same(first, second, step))
    parted = common[place] if place < len(common) else None
    text = compare_records(first, second)
    row = int(text.first_step.what) if text.first_step is not None else None
    traced = _first_other(*(read_trace(RunFolder(record.path).steps) for record in (first, second)))
    ends = [int(record.results.get("steps") or max(_steps(record), default=0)) for record in (first, second)]
    last = min(ends)
    is_end_other = ends[0] == ends[1] and bool(text.other_hashes)  # the longer run has other final weights
    known = [step for step in (parted, traced, row, last if is_end_other else None) if step is not None]
    differs = min(known, default=None)
    same = max((step for step in common[:place] if differs is None or step < differs), default=0)
    lines = [
        f"same      {'checkpoint of step ' + str(same) if same else 'nothing stored; the replays start at step 0'}"
    ]
    if differs is not None:
        names = {traced: "loss or gradient norm", parted: "checkpoint", row: "logged loss"}
        lines.append(f"differs   {names.get(differs, 'final weights')} of step {differs}")
    is_traced = differs is not None and differs == traced
    end = traced if is_traced and traced else parted or last
    return Window(same, differs, end, (ends[0], ends[1]), tuple(lines))


def _first_other(first: Iterable[Numbers], second: Iterable[Numbers]) -> int | None:
    """The first step whose recorded numbers differ in a bit."""
    for step, pair in enumerate(zip(first, second, strict=False), start=1):
        if UNKNOWN not in pair and len({tuple(map(_bits, numbers)) for numbers in pair}) > 1:
            return step
    return None


def _bits(number: float) -> str:
    return number.hex()  # nan equals nan


def _is_same(first: RunRecord, second: RunRecord, step: int) -> bool:
    return compare_step(first.path, second.path, step).difference is None


def _steps(record: RunRecord) -> list[int]:
    return [row["step"] for row in record.rows if row["kind"] == "step"]


def _require_same_data(records: list[RunRecord], window: Window) -> None:
    """Runs with the same settings and other data: the data has changed in between, and only one of them is left."""
    recorded = [_recorded_data(record.path) for record in records]
    if None in recorded or not (changed := differences(*recorded)):
        return
    if all(records[0].config[name] == records[1].config[name] for name in (*_OF_DATA, "seed")):
        raise DataError(
            "the data has changed between the two runs, so one of them cannot be replayed",
            got="\n".join([*changed, *window.lines]),
            hint="the changed data is the first suspect; paceline compare shows what else differs",
        )


def _recorded_data(run: Path) -> Any:
    try:
        return read_json_object(RunFolder(run).data)["fingerprint"]
    except (OSError, ValueError, KeyError):
        return None


def _cannot_replay(error: PacelineError, window: Window) -> PacelineError:
    """The error of a replay, with what is known without it."""
    known = "\n".join(window.lines)
    got = f"{error.got}\n{known}" if error.got is not None else known
    hint = (
        error.hint if isinstance(error, DataError) else "move this checkpoint away: the replay starts at the one before"
    )
    return type(error)(error.what, where=error.where, got=got, allowed=error.allowed, hint=hint)


# --- Replays


class _Work:
    def __init__(self, first: Replay, second: Replay, window: Window, found: Bisection, tell: Tell) -> None:
        self._pair = first, second
        self._window = window
        self._found = found
        self._tell = tell
        self.numbers: tuple[dict[int, Numbers], dict[int, Numbers]] = ({}, {})  # of the replayed steps
        self._states: tuple[State, State] = ((), ())  # after the step that differs
        self._candidates: list[Candidate] = []
        self.can_be_same = [False, False]  # whether a replay has the bits of the run

    def find(self) -> None:
        first, second = self._pair
        self._start(first)
        self._start(second)
        self.can_be_same = [replay.trained.can_give_same_bits for replay in self._pair]
        self._require_same_parts()
        configs = [flatten(replay.session.config) for replay in self._pair]
        self._found.step = self._find_step()
        if self._found.step is None:
            return
        self._found.place = self._find_place(self._found.step)
        self._tell(f"first     step {self._found.step}: {self._found.place}")
        self._candidates = _differing(*configs)
        self._find_cause(self._found.step)

    def _start(self, replay: Replay, flags: Sequence[Setting] = ()) -> None:
        self._found.replays += 1
        try:
            replay.start_at(self._window.same, flags)
        except CheckpointError:
            if not flags:
                replay.start_at(0)  # a start without a checkpoint does not compare the data
                self._require_recorded_data(replay)
            raise
        if not flags:
            self._require_recorded_data(replay)

    def _require_recorded_data(self, replay: Replay) -> None:
        recorded = _recorded_data(replay.run)
        now = json.loads(json.dumps(replay.components.data.to_json()["fingerprint"]))
        if recorded is not None and (changed := differences(recorded, now)):
            raise DataError(
                "the data has changed since this run, so it cannot be replayed",
                where=str(replay.run),
                got="\n".join(changed),
                hint="--data-dir PATH of the data it was trained with",
            )

    def _require_same_parts(self) -> None:
        tensors = [model_tensors(replay.components.model.module) for replay in self._pair]
        shapes = [{name: tuple(value.shape) for name, value in part.items()} for part in tensors]
        other = next((name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)), None)
        if other is not None:
            raise UserError(
                "these runs train different models, so no step of one can equal a step of the other",
                got=f"{other}: {shapes[0].get(other, 'not there')} in A, {shapes[1].get(other, 'not there')} in B",
                hint="paceline compare shows their settings and results side by side",
            )

    def _find_step(self) -> int | None:
        first, second = self._pair
        self._states = digest_state(first), digest_state(second)
        if self._states[0] != self._states[1]:
            return self._window.same
        end = self._window.end
        for one, other in zip(first.steps(end), second.steps(end), strict=True):
            numbers = [(taken.loss, taken.grad_norm) for taken in (one, other)]
            self.numbers[0][one.step], self.numbers[1][one.step] = numbers
            self._states = digest_state(first), digest_state(second)
            if self._states[0] != self._states[1] or _first_other(numbers[:1], numbers[1:]):
                return one.step
        return None

    def _find_place(self, step: int) -> Place | None:
        first, second = self._pair
        if step == self._window.same:
            where = "the state after it" if step else "the initial state"
            return Place(f"{where}, first {first_tensor(state_of(first), state_of(second))}")
        for replay in self._pair:
            self._start(replay)
            for _ in replay.steps(step - 1):
                pass
        return first_difference(trace_step(first), trace_step(second))

    def _find_cause(self, step: int) -> None:
        """The first settings of B that, added to A one by one, change its step: by halving."""
        candidates = self._candidates
        if not candidates or self._try(step, candidates) != self._states[1]:
            self._found.notes.append("the settings alone do not turn A into B")
            self._found.causes = candidates
            return
        low, high = 0, len(candidates)  # A with the first `low` settings is still A at this step
        while high - low > 1:
            middle = (low + high) // 2
            if self._try(step, candidates[:middle]) in (self._states[0], None):
                low = middle
            else:
                high = middle
        cause = candidates[low:high]
        is_alone = len(candidates) == 1 or self._try(step, cause) == self._states[1]
        self._found.causes = cause if is_alone else candidates[:high]
        self._found.is_cause_tried = True

    def _try(self, step: int, candidates: Sequence[Candidate]) -> State | None:
        """The state of A after a step with these settings of B; None if they do not fit together."""
        self._tell(f"trying    A with {', '.join(one.name for one in candidates)} of B")
        base, values = self._pair[0], {one.name: one.second for one in candidates}
        if any(one.kind == "data" for one in candidates):
            # A checkpoint belongs to its data. Both are equal here, so B's can be used, with the other settings of A.
            base, values = self._pair[1], {one.name: one.first for one in self._candidates if one not in candidates}
        flags = [Setting(field_table()[name], as_typed(value), "flag", "bisect") for name, value in values.items()]
        try:
            self._start(base, flags)
            for _ in base.steps(step):
                pass
        except UserError:
            return None
        return digest_state(base)


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[Candidate]:
    names = [name for name in first if first[name] != second[name] and name not in (*SILENT, *_ASIDE)]
    return [Candidate(_kind(name), name, first[name], second[name]) for name in names]


def _kind(name: str) -> str:
    if name == "seed":
        return "seed"
    return "data" if field_table()[name].group == "data" and name in _OF_DATA else "flag"


# --- If the replays agree


def _other_causes(first: Path, second: Path) -> list[Candidate]:
    """What the runs record of code, packages and machines, where it differs."""
    found = []
    environments = [_read(RunFolder(path).environment) for path in (first, second)]
    for name, kind in _ENVIRONMENT.items():
        a, b = (environment.get(name) for environment in environments)
        if isinstance(a, dict) and isinstance(b, dict):
            found += [
                Candidate(kind, key, a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)
            ]
        elif a != b:
            found.append(Candidate(kind, name, a, b))
    hosts = [sorted({str(rank.get("host")) for rank in _ranks(path)}) for path in (first, second)]
    return found + ([Candidate("machine", "hosts", *hosts)] if hosts[0] != hosts[1] else [])


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def _ranks(run: Path) -> list[dict[str, Any]]:
    entries = _read(RunFolder(run).results).get("process_metrics", [])
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _who_deviates(records: list[RunRecord], work: _Work) -> list[str]:
    """Which run has recorded other numbers than its replay here, and from which step on."""
    notes = []
    for label, record, replayed, can_be_same in zip("AB", records, work.numbers, work.can_be_same, strict=True):
        losses = {step: loss for step, (loss, _) in replayed.items()}
        steps = _first_deviation(logged_losses(record.rows), losses)
        trace = read_trace(RunFolder(record.path).steps) if can_be_same else []
        exact = _first_other(trace, [replayed.get(step, UNKNOWN) for step in range(1, len(trace) + 1)])
        if exact is not None:
            steps = range(exact, exact + 1)
        if steps is not None:
            where = f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            notes.append(f"{label} is not what its settings give: it leaves its replay in {where}")
    return notes or ["no logged loss differs from the replays: the difference is smaller than what was logged"]


def _first_deviation(logged: dict[tuple[int, int], float], replayed: dict[int, float]) -> range | None:
    """The steps of the first logged interval whose mean loss is not that of the replay."""
    for (before, step), loss in logged.items():
        interval = [replayed[number] for number in range(before + 1, step + 1) if number in replayed]
        if len(interval) == step - before and abs(sum(interval) / len(interval) - loss) > _CLOSE * abs(loss):
            return range(before + 1, step + 1)
    return None


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value) or "''"
