"""Runs the cells of a study on this machine, one after the other, and reports progress."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EXIT_FINISHED, EXIT_USER, UserError
from paceline.launch.child import start_child
from paceline.runs.folder import RunFolder, write_json
from paceline.tools.study.collect import Measured, State, measure, note_path, read_note, state_of
from paceline.tools.study.grid import CELLS, Cell, CellSpec

_LAST_LINES = 12


@dataclass
class CellState:
    """A row of the table."""

    cell: Cell
    state: State
    reason: str = ""
    measured: Measured | None = None
    began: float = 0.0  # monotonic, while it runs
    wall_s: float | None = None


def read_states(folder: Path, spec: CellSpec) -> list[CellState]:
    """The state of every cell, from its folder. A cell in state running that we did not start was interrupted."""
    states = []
    for cell in spec.cells():
        state, reason = state_of(folder, cell)
        found = CellState(cell, state, reason, wall_s=read_note(folder, cell).get("wall_s"))
        if state == "finished":
            found.measured = measure(folder, cell)
        states.append(found)
    return states


def open_cells(states: Sequence[CellState], *, retries: bool) -> list[CellState]:
    """The cells still to run: no finished cells, and failed ones only with `retries`."""
    return [found for found in states if found.state != "finished" and (retries or found.state != "failed")]


def prepare(folder: Path, spec: CellSpec, found: CellState) -> None:
    """Remove the folder of an interrupted try, unless the cell continues from its checkpoint."""
    run = RunFolder(folder / CELLS / found.cell.name)
    if run.path.is_symlink() or run.path.exists():
        is_ours = run.path.is_dir() and not run.path.is_symlink() and (run.holds_a_run or not any(run.path.iterdir()))
        if not is_ours:
            raise UserError("a cell's folder holds something else", where=str(run.path), hint="move it away")
        run.refuse_if_owned()
        if not spec.continues_cells:
            shutil.rmtree(run.path)
    note_path(folder, found.cell).unlink(missing_ok=True)
    found.state, found.reason = "waiting", ""


def run_local(
    folder: Path,
    spec: CellSpec,
    states: Sequence[CellState],
    *,
    retries: bool,
    on_change: Callable[[CellState], Any],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run the open cells. Calls `on_change` at every change. `environment`: of the cells, instead of this process's."""
    for found in open_cells(states, retries=retries):
        prepare(folder, spec, found)
        found.state, found.began = "running", time.monotonic()
        on_change(found)
        code, reason = _run(folder, spec, found, environment)
        found.wall_s = time.monotonic() - found.began
        note = {"code": code, "wall_s": found.wall_s, "words": reason}
        write_json(note_path(folder, found.cell), note)
        if code == EXIT_USER:
            found.state, found.reason = "failed", reason
            on_change(found)
            raise UserError(f"cell {found.cell.name} is refused", got=reason, hint=f"see {_log(folder, found.cell)}")
        found.state, found.reason = state_of(folder, found.cell)
        if found.state == "finished":
            found.measured = measure(folder, found.cell)
        elif found.state != "failed":
            found.state, found.reason = "failed", reason
        on_change(found)


def _run(folder: Path, spec: CellSpec, found: CellState, environment: Mapping[str, str] | None) -> tuple[int, str]:
    """Run one cell's command. Returns its exit code and, if it failed, its error or its last lines."""
    log = _log(folder, found.cell)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = spec.command(found.cell, folder)
    with log.open("wb") as out, start_child(command, stdout=out, stderr=out, environment=environment) as child:
        code, error = child.wait(), child.error()
    if code == EXIT_FINISHED:
        return code, ""
    return code, f"error: {error.what}" if error is not None else _last_lines(log)


def _log(folder: Path, cell: Cell) -> Path:
    return folder / CELLS / f"{cell.name}.log"


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:])


def estimate_left_s(states: Iterable[CellState]) -> float | None:
    """Seconds for the remaining cells, from finished cells of the same kind, or of any kind."""
    states = list(states)
    known: dict[int, list[float]] = {}
    for found in states:
        if found.state == "finished" and found.wall_s:
            known.setdefault(found.cell.world_size, []).append(found.wall_s)
    if not known:
        return None
    anyone = statistics.fmean(seconds for group in known.values() for seconds in group)
    left = 0.0
    for found in states:
        if found.state in ("waiting", "running"):
            usual = statistics.fmean(known.get(found.cell.world_size, [anyone]))
            spent = time.monotonic() - found.began if found.state == "running" else 0.0
            left += max(usual - spent, 0.0)
    return left


def describe(found: CellState) -> str:
    """One line of plain text."""
    name = f"{found.cell.name:<18}"
    if found.state == "finished" and found.measured is not None:
        took = f", {found.wall_s:.0f} s in all" if found.wall_s else ""
        m = found.measured
        accuracy = "" if m.test_accuracy is None else f", test accuracy {m.test_accuracy:.2%}"
        return (
            f"{name} finished  {m.images_per_s:>9,.0f} images/s, {m.epoch_s:.2f} s per epoch, "
            f"{1000 * m.step_s:.1f} ms per step{accuracy}{took}"
        )
    reason = found.reason.splitlines()[0] if found.reason else ""
    return f"{name} {found.state:<9} {reason}".rstrip()
