"""Uses runs that were started by hand as cells of a study. Gives the reason for each run that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoints.identity import IDENTITY
from paceline.errors import EXIT_DIFFERENT, PacelineError, UserError
from paceline.runs.catalog import find_run, recipe_of
from paceline.runs.comparison import RunRecord, config_differences, read_record
from paceline.runs.folder import RunFolder
from paceline.tools.study.collect import Measured, measure_run
from paceline.tools.study.grid import BY_HAND, STRATEGIES, Cell, StudySpec

# Runs that differ in one of these are not the same work. The global batch decides about strong and weak scaling.
_SAME_WORK = tuple(name for name in IDENTITY if name not in ("global_batch_size", "seed"))
# A study sets these for each cell, or they do not change what is computed.
_NOT_NOTED = ("strategy", "processes", "global_batch_size", "seed", "log_frequency", "data_dir")
_MOST_NAMES = 3


@dataclass
class NamedRun:
    """One run that the user named."""

    name: str
    record: RunRecord | None = None
    why_not: str = ""  # it is left out
    notes: list[str] = field(default_factory=list)  # it is in the table, but differs
    measured: Measured | None = None

    @property
    def recipe(self) -> str:
        return recipe_of(self.record.path) if self.record else ""


def collect_runs(names: Sequence[str]) -> tuple[StudySpec | None, list[NamedRun]]:
    """Every run with its measurements, or the reason why it is left out. No spec if no run remains."""
    runs = _read_all(names)
    finished = [run for run in runs if run.record is not None and not run.why_not]
    if finished:
        _leave_out_other_work(finished)
    used = _measure_all([run for run in finished if not run.why_not])
    return (_spec(used) if used else None), runs


def _read_all(names: Sequence[str]) -> list[NamedRun]:
    runs, seen = [], set()
    for name in names:
        run = NamedRun(name)
        runs.append(run)
        try:
            folder = find_run(name)
            run.name = folder.path.name
            where = folder.path.resolve()
            if where in seen:
                run.why_not = "given twice"
                continue
            seen.add(where)
            run.record = read_record(folder.path, [])
        except PacelineError as error:
            run.why_not = error.what if error.got is None else f"{error.what}: {error.got}"
            continue
        if not run.record.is_finished:
            run.why_not = f"no results: {run.record.status}"
    return runs


def _leave_out_other_work(runs: list[NamedRun]) -> None:
    """The reference is the work of most runs; with a tie, the first."""
    works = [_work(run) for run in runs]
    usual, _ = Counter(works).most_common(1)[0]
    reference = runs[works.index(usual)]
    for run, work in zip(runs, works, strict=True):
        if run is reference:
            continue
        differences = config_differences([_record(reference), _record(run)])
        if work != usual:
            names = [name for name in differences if name in _SAME_WORK]
            values = ", ".join(f"{name} {differences[name][1]}" for name in names[:_MOST_NAMES])
            run.why_not = f"other work than {reference.name}: {values}"
        elif names := [name for name in differences if name not in _NOT_NOTED]:
            run.notes.append("other " + ", ".join(names[:_MOST_NAMES]))


def _work(run: NamedRun) -> tuple[Any, ...]:
    config = _record(run).config
    return tuple(repr(config.get(name)) for name in _SAME_WORK)


def _record(run: NamedRun) -> RunRecord:
    assert run.record is not None
    return run.record


def _measure_all(runs: list[NamedRun]) -> list[NamedRun]:
    """Those that can be measured, as cells."""
    if not runs:
        return []
    sizes = {id(run): _size_and_batch(run) for run in runs}
    least, batch = min(sizes.values())
    repeats: Counter[tuple[str, str, int]] = Counter()
    used = []
    for run in runs:
        size, own_batch = sizes[id(run)]
        is_weak = own_batch != batch and own_batch * least == batch * size
        if own_batch != batch and not is_weak:
            weak = batch * size // least
            run.why_not = f"global batch {own_batch}; strong scaling needs {batch}, weak scaling {weak}"
            continue
        cell = Cell(_strategy(run), size, "weak" if is_weak else "strong", 0, own_batch)
        repeats[cell.key] += 1
        cell = Cell(cell.strategy, size, cell.scaling, repeats[cell.key], own_batch)
        try:
            run.measured = measure_run(RunFolder(_record(run).path), cell, {})
        except UserError as error:
            run.why_not = f"{error.what}: {error.got}"
            repeats[cell.key] -= 1
            continue
        _note_parts(run)
        used.append(run)
    return used


def _size_and_batch(run: NamedRun) -> tuple[int, int]:
    results = _record(run).results
    return int(results.get("world_size") or 1), int(_record(run).config["global_batch_size"])


def _strategy(run: NamedRun) -> str:
    """One rank without sharding counts as DDP."""
    strategy = str(_record(run).results.get("strategy"))
    return strategy if strategy in STRATEGIES else "ddp"


def _note_parts(run: NamedRun) -> None:
    """A resumed run has the times of its last part only, and an epoch may be split."""
    results = _record(run).results
    samples = sum(rank.get("samples", 0) for rank in results.get("process_metrics", ()))
    if samples != results.get("samples_seen"):
        run.notes.append("resumed: times are of its last part")


def _spec(runs: list[NamedRun]) -> StudySpec:
    cells = [run.measured.cell for run in runs if run.measured is not None]
    first = min(cells, key=lambda cell: cell.world_size)
    scalings = {cell.scaling for cell in cells if cell.world_size > 1} or {"strong"}
    strategies = {cell.strategy for cell in cells}
    return StudySpec(
        recipe=runs[0].recipe,
        name=runs[0].recipe,
        flags=(),
        world_sizes=tuple(sorted({cell.world_size for cell in cells})),
        strategies=tuple(name for name in STRATEGIES if name in strategies),
        repeats=max(cell.repeat for cell in cells),
        scaling=scalings.pop() if len(scalings) == 1 else "both",
        global_batch_size=first.global_batch_size,
        stated=tuple(f"{run.name}: {'; '.join(run.notes)}" for run in runs if run.notes),
        place=BY_HAND,
    )


def table_of(runs: Sequence[NamedRun]) -> list[list[str]]:
    """A row for every run that was named, in that order."""
    rows = [["run", "recipe", "method", "ranks", "batch", "images/s", "s per epoch", "notes"]]
    for run in runs:
        if run.measured is None:
            rows.append([run.name, run.recipe, *["-"] * 5, f"left out: {run.why_not}"])
            continue
        found, cell = run.measured, run.measured.cell
        numbers = [str(cell.world_size), str(cell.global_batch_size), f"{found.images_per_s:,.0f}"]
        method = cell.strategy + (" weak" if cell.scaling == "weak" else "")
        rows.append([run.name, run.recipe, method, *numbers, f"{found.epoch_s:.2f}", "; ".join(run.notes)])
    return rows


def write_collected(folder: Path, spec: StudySpec, runs: Sequence[NamedRun]) -> list[str]:
    """results.csv, plots and page; returns the lines to print."""
    from paceline.tools.study.report import write_report

    cells = [run.measured for run in runs if run.measured is not None]
    folder.mkdir(parents=True, exist_ok=True)
    left_out = [(run.name, run.why_not) for run in runs if run.measured is None]
    machine = next(run.record.path for run in runs if run.measured is not None and run.record is not None)
    return write_report(folder, spec, left_out, cells=cells, machine_of=machine)


def collect(names: Sequence[str], folder: Path | None) -> tuple[list[list[str]], list[str], int]:
    """The table, the lines below it and the exit code."""
    spec, runs = collect_runs(names)
    if spec is None:
        return table_of(runs), ["no run has results, so there is nothing to report"], EXIT_DIFFERENT
    target = folder or Path("studies") / f"{spec.name}-collected"
    return table_of(runs), write_collected(target.absolute(), spec, runs), 0
