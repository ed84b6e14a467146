"""Runs the cells of a study or a sweep and shows them: a live table on a terminal, otherwise one line per change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED
from paceline.launch.job import JobSpec
from paceline.metrics.console import format_seconds
from paceline.tools.study.cells import CellState, describe, estimate_left_s, run_local
from paceline.tools.study.grid import CellSpec
from paceline.tools.study.queue import run_queue

_STYLES = {"waiting": "dim", "running": "bold cyan", "finished": "green", "failed": "bold red"}
_MOST_ROWS = 30


class Board:
    """Shows the cells while they run."""

    def __init__(self, spec: CellSpec, states: Sequence[CellState], folder: Path) -> None:
        self._states = list(states)
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live = Live(self, console=self._out, refresh_per_second=2) if self._out.is_terminal else None
        done = sum(found.state == "finished" for found in states)
        self._out.print(spec.headline + (f", {done} done already" if done else ""), markup=False)
        for text in spec.stated:
            self._out.print(f"the same  {text}", markup=False)
        self._out.print(f"folder    {os.path.relpath(folder)}", markup=False)

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, found: CellState) -> None:
        """Show a changed cell."""
        if self._live is not None:
            self._live.refresh()
            return
        done = sum(other.state in ("finished", "failed") for other in self._states)
        left = estimate_left_s(self._states)
        eta = f"  eta {format_seconds(left)}" if left else ""
        self._out.print(f"[{done}/{len(self._states)}] {describe(found)}{eta}", markup=False)

    def say(self, text: str) -> None:
        self._out.print(text, markup=False)

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for column in ("cell", "state"):
            table.add_column(column)
        for column in ("images/s", "s/epoch", "ms/step", "accuracy"):
            table.add_column(column, justify="right")
        # On a long grid show only the last rows: running, failed, and last finished cells.
        rows = [found for found in self._states if found.state != "waiting"][-_MOST_ROWS:]
        for found in rows:
            m = found.measured
            numbers = ("", "", "", "")
            if m is not None:
                accuracy = "" if m.test_accuracy is None else f"{m.test_accuracy:.2%}"
                numbers = (f"{m.images_per_s:,.0f}", f"{m.epoch_s:.2f}", f"{1000 * m.step_s:.1f}", accuracy)
            table.add_row(found.cell.name, Text(found.state, style=_STYLES[found.state]), *numbers)
        waiting = sum(found.state == "waiting" for found in self._states)
        left = estimate_left_s(self._states)
        eta = f", about {format_seconds(left)} to go" if left else ""
        return Group(table, Text(f"{waiting} waiting{eta}", style="dim"))


def run_cells(
    folder: Path, spec: CellSpec, states: list[CellState], shapes: dict[int, JobSpec], *, retries: bool
) -> None:
    """As jobs of these shapes (by world size), or without shapes on this machine."""
    try:
        with Board(spec, states, folder) as board:
            if shapes:
                run_queue(folder, spec, shapes, states, retries=retries, on_change=board.update, say=board.say)
            else:
                run_local(folder, spec, states, retries=retries, on_change=board.update)
    except KeyboardInterrupt:
        words = "the jobs stay in the queue; " if shapes else ""
        print(f"\nstopped; {words}the same command continues", file=sys.stderr)
        raise


def print_end(states: Sequence[CellState], write_report: Callable[[list[tuple[str, str]]], Iterable[str]]) -> int:
    """Print failed cells and the lines of the report, which gets the failures. Returns the exit code."""
    failed = [(found.cell.name, found.reason) for found in states if found.state == "failed"]
    for name, reason in failed:
        print(f"failed    {name}: {reason}")
    if not any(found.state == "finished" for found in states):
        print("no cell has finished, so there is nothing to report")
        return EXIT_DIFFERENT
    for line in write_report(failed):
        print(line)
    if failed:
        print("next      the same command with --retry")
    return EXIT_DIFFERENT if failed else EXIT_FINISHED
