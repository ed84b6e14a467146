"""Reads the measurements of the cells from their run folders, and writes `results.csv`, a row per cell and repeat."""

from __future__ import annotations

import csv
import io
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.errors import UserError
from paceline.metrics.phases import STEP_PHASES
from paceline.metrics.recorder import read_rows
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runs.json_files import MAYBE, RESULTS, Fields, Number, fit, read_bounded, read_object
from paceline.settings.small_files import parse_json, read_small
from paceline.tools.study.grid import CELLS, Cell, StudySpec

CSV_FILE = "results.csv"
_LARGEST_TABLE_BYTES = 64 * 2**20
_NOTE = Fields(optional={"code": Number(-255, 255, is_whole=True), "wall_s": (Number(0), MAYBE), "words": str})
# The first seven are the columns of the course's own results.csv, so its scripts can read this file.
COLUMNS = (
    *("method", "gpus", "epoch", "time", "val_loss", "acc", "peak_mem"),
    *("scaling", "repeat", "global_batch_size", "samples_per_rank", "steps_per_epoch", "images_per_second"),
    *("step_ms_mean", "step_ms_p50", "step_ms_p95", *(f"{phase}_ms" for phase in STEP_PHASES)),
    *("communicated_bytes_per_step", "peak_mem_each", "test_accuracy", "test_loss", "energy_joules", "precision"),
    *("parameters", "attempts", "wall_seconds", "device", "hosts", "run"),
)
State = Literal["waiting", "running", "finished", "failed"]


@dataclass(frozen=True)
class Measured:
    """A finished cell."""

    cell: Cell
    epoch_s: float
    step_s: float
    images_per_s: float
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    phases_s: dict[str, float | None] = field(default_factory=dict)  # empty if only epochs were timed
    epochs: int = 1
    steps_per_epoch: int = 1
    bytes_per_step: int = 0
    peak_mb: tuple[float, ...] = ()
    val_loss: float | None = None
    val_accuracy: float | None = None  # of the last epoch, like val_loss
    best_val_loss: float | None = None
    best_val_accuracy: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    energy_j: float | None = None
    precision: str = ""
    parameters: int = 0
    attempts: int = 1
    wall_s: float | None = None
    device: str = ""
    hosts: int = 1
    run: str = ""  # the name of its folder

    @property
    def samples_per_rank(self) -> int:
        return self.cell.global_batch_size // self.cell.world_size


def state_of(folder: Path, cell: Cell) -> tuple[State, str]:
    """The state of a cell and, if it failed, the reason."""
    run = RunFolder(folder / CELLS / cell.name)
    status = run.read_status()
    if status.get("status") == "finished" and run.results.exists():
        return "finished", ""
    note = read_note(folder, cell)
    if note.get("code"):
        return "failed", str(status.get("reason") or note.get("words") or f"exit code {note['code']}")
    if status.get("status") == "failed":
        return "failed", str(status.get("reason") or "")
    return ("running", "") if status.get("status") == "running" else ("waiting", "")


def note_path(folder: Path, cell: Cell) -> Path:
    """The study's own file about a cell. It is next to the cell's folder, because a new try removes that folder."""
    return folder / CELLS / f"{cell.name}.json"


def read_note(folder: Path, cell: Cell) -> dict[str, Any]:
    return read_object(note_path(folder, cell), _NOTE)


def collect(folder: Path, spec: StudySpec) -> list[Measured]:
    """Every finished cell, in the order of the grid."""
    return [measure(folder, cell) for cell in spec.cells() if state_of(folder, cell)[0] == "finished"]


def measure(folder: Path, cell: Cell) -> Measured:
    return measure_run(RunFolder(folder / CELLS / cell.name), cell, read_note(folder, cell))


def measure_run(run: RunFolder, cell: Cell, note: dict[str, Any]) -> Measured:
    """The measurements of a finished run. `note`: the study's own data about it."""
    try:
        results = fit(parse_json(read_bounded(run.results)), RESULTS)
        if not any(rank["samples"] for rank in results["process_metrics"]):
            raise UserError(
                "the times of its steps are not known",
                where=str(run.path),
                got="no step ran in its last attempt",
                hint="--retry",
            )
        rows = [row for row in read_rows(run.metrics_jsonl) if row["kind"] == "epoch"]
        found = _measure(cell, results, rows, note, _count_lines(run.failures))
        return replace(found, run=run.path.name)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError("this cell cannot be read", where=str(run.path), got=repr(error), hint="--retry") from error


def _measure(
    cell: Cell, results: dict[str, Any], rows: list[dict[str, Any]], note: dict[str, Any], failures: int
) -> Measured:
    ranks = results["process_metrics"]
    seconds = [row["seconds"] for row in rows if row["phase"] == "train"]
    warm = seconds[1:] or seconds  # the first epoch includes one-time costs
    validations = [row for row in rows if row["phase"] == "val"]
    epochs = len(seconds)
    steps_per_epoch = results["steps"] // max(epochs, 1)
    epoch_s = statistics.fmean(warm)
    energies = [rank.get("energy_joules") for rank in ranks]
    return Measured(
        cell,
        epoch_s=epoch_s,
        step_s=statistics.fmean(rank["step_ms"]["mean"] for rank in ranks) / 1000,
        images_per_s=steps_per_epoch * cell.global_batch_size / epoch_s,
        step_p50_s=statistics.fmean(rank["step_ms"]["p50"] for rank in ranks) / 1000,
        step_p95_s=max(rank["step_ms"]["p95"] for rank in ranks) / 1000,
        phases_s={phase: _mean_phase(ranks, phase) for phase in STEP_PHASES},
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        bytes_per_step=max(rank["communicated_bytes_per_step"] for rank in ranks),
        peak_mb=tuple(rank["peak_memory_mb"] for rank in ranks),
        val_loss=validations[-1]["loss"] if validations else None,
        val_accuracy=validations[-1].get("accuracy") if validations else None,
        best_val_loss=min((row["loss"] for row in validations), default=None),
        best_val_accuracy=max((row["accuracy"] for row in validations if "accuracy" in row), default=None),
        test_accuracy=results["test_accuracy"],
        test_loss=results["test_loss"],
        energy_j=None if None in energies else sum(energies),
        precision=results["distributed_training"]["precision"],
        parameters=results["model_info"]["parameters"],
        attempts=1 + failures,
        wall_s=note.get("wall_s"),
        device=str(ranks[0]["device"]).partition(":")[0],
        hosts=len({rank["host"] for rank in ranks}),
    )


def _mean_phase(ranks: list[dict[str, Any]], phase: str) -> float | None:
    values = [rank["breakdown_ms"][phase] for rank in ranks]
    return None if None in values else statistics.fmean(values) / 1000


def _count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def write_csv(path: Path, cells: list[Measured]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for found in cells:
        writer.writerow(_row(found))
    write_atomically(path, text.getvalue())


def _row(found: Measured) -> dict[str, Any]:
    cell = found.cell
    phases = {f"{phase}_ms": _ms(found.phases_s.get(phase)) for phase in STEP_PHASES}
    return {
        "method": cell.strategy,
        "gpus": cell.world_size,
        "epoch": found.epochs,
        "time": found.epoch_s,
        "val_loss": found.val_loss,
        "acc": None if found.val_accuracy is None else 100 * found.val_accuracy,
        "peak_mem": max(found.peak_mb, default=None),
        "scaling": cell.scaling,
        "repeat": cell.repeat,
        "global_batch_size": cell.global_batch_size,
        "samples_per_rank": found.samples_per_rank,
        "steps_per_epoch": found.steps_per_epoch,
        "images_per_second": found.images_per_s,
        "step_ms_mean": _ms(found.step_s),
        "step_ms_p50": _ms(found.step_p50_s),
        "step_ms_p95": _ms(found.step_p95_s),
        **phases,
        "communicated_bytes_per_step": found.bytes_per_step,
        "peak_mem_each": " ".join(f"{mb:.1f}" for mb in found.peak_mb),
        "test_accuracy": found.test_accuracy,
        "test_loss": found.test_loss,
        "energy_joules": found.energy_j,
        "precision": found.precision,
        "parameters": found.parameters,
        "attempts": found.attempts,
        "wall_seconds": found.wall_s,
        "device": found.device,
        "hosts": found.hosts,
        "run": found.run,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def read_csv(path: Path, *, global_batch_size: int = 256, steps_per_epoch: int = 1) -> list[Measured]:
    """Cells from a file: our own results.csv, or a table with the course's columns only."""
    try:
        rows = list(csv.DictReader(read_small(path, _LARGEST_TABLE_BYTES).decode().splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError("these results cannot be read", where=str(path), got=str(error)[:200]) from error
    missing = {"method", "gpus", "time"} - set(rows[0] if rows else ())
    if missing:
        raise UserError("this is not a table of results", where=str(path), allowed=f"columns {', '.join(COLUMNS[:7])}")
    repeats: dict[tuple[str, str, int], int] = {}
    cells = []
    for number, row in enumerate(rows, start=2):
        try:
            cells.append(_from_row(row, repeats, global_batch_size, steps_per_epoch))
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise UserError("a row cannot be read", where=f"{path}:{number}", got=str(error)) from error
    return cells


def _from_row(row: dict[str, str], repeats: dict[tuple[str, str, int], int], batch: int, steps: int) -> Measured:
    def number(name: str) -> float | None:
        return float(row[name]) if row.get(name) else None

    scaling, size = row.get("scaling") or "strong", int(row["gpus"])
    key = (scaling, row["method"], size)
    repeats[key] = repeats.get(key, 0) + 1
    cell = Cell(row["method"], size, scaling, repeats[key], int(number("global_batch_size") or batch))
    steps = int(number("steps_per_epoch") or steps)
    epoch_s = float(row["time"])
    phases = {phase: number(f"{phase}_ms") for phase in STEP_PHASES}
    accuracy, peak = number("acc"), number("peak_mem")
    each = tuple(float(mb) for mb in (row.get("peak_mem_each") or "").split())
    step_ms = number("step_ms_mean")
    return Measured(
        cell,
        epoch_s=epoch_s,
        step_s=step_ms / 1000 if step_ms else epoch_s / steps,
        images_per_s=number("images_per_second") or steps * cell.global_batch_size / epoch_s,
        step_p50_s=_seconds(number("step_ms_p50")),
        step_p95_s=_seconds(number("step_ms_p95")),
        phases_s={k: _seconds(v) for k, v in phases.items()} if any(phases.values()) else {},
        epochs=int(number("epoch") or 1),
        steps_per_epoch=steps,
        bytes_per_step=int(number("communicated_bytes_per_step") or 0),
        peak_mb=each or ((peak,) if peak is not None else ()),
        val_loss=number("val_loss"),
        val_accuracy=None if accuracy is None else accuracy / 100,
        test_accuracy=number("test_accuracy"),
        test_loss=number("test_loss"),
        energy_j=number("energy_joules"),
        precision=row.get("precision") or "",
        parameters=int(number("parameters") or 0),
        attempts=int(number("attempts") or 1),
        wall_s=number("wall_seconds"),
        device=row.get("device") or "",
        hosts=int(number("hosts") or 1),
        run=row.get("run") or "",
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
