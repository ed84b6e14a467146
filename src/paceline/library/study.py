"""`paceline.study(...)`: measure how a recipe scales on this machine, as `paceline study` does."""

from __future__ import annotations

import html
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch.request import read_request
from paceline.library.call import as_settings, functions_in
from paceline.library.child_run import child_environment
from paceline.library.functions import is_importable, name_of
from paceline.library.run_inputs import SOURCE_FILE
from paceline.library.table import Table
from paceline.library.train import _refuse_within_a_rank
from paceline.settings.declare import fields_of
from paceline.settings.values import Setting, as_typed, build
from paceline.tools.study.board import Board
from paceline.tools.study.cells import CellState, read_states, run_local
from paceline.tools.study.grid import (
    Asked,
    StudySpec,
    check_cells,
    continue_study,
    plan_study,
    refuse_taken,
    write_spec,
)
from paceline.tools.study.report import PAGE, write_report

_ANSWER = "answer    "


def study(
    recipe: str | Path = "shapes-cnn",
    *,
    world_sizes: tuple[int, ...] | list[int] = (),
    strategies: tuple[str, ...] | list[str] = ("ddp",),
    repeats: int = 3,
    scaling: str = "strong",
    retry: bool = False,
    output_dir: str | Path | None = None,
    quiet: bool = False,
    **flags: Any,
) -> Study:
    """Train a recipe on every world size with every strategy, several times, on this machine.

    Every flag of `paceline train` is a keyword, as for `paceline.train`. Each cell is an ordinary run in the folder of
    the study (studies/RECIPE unless given). The same call again continues a study that was stopped; with `retry` it
    also runs failed cells again.
    """
    _refuse_within_a_rank()
    given = {"world_sizes": world_sizes, "strategies": strategies, "repeats": repeats, "scaling": scaling}
    asked = build(Asked, [_setting(name, value) for name, value in given.items() if value != ()])
    settings = _flags(flags)
    refuse_taken(settings)
    loaded = read_request(str(recipe), settings)
    spec = plan_study(loaded, asked, settings, place="local")
    folder = Path(output_dir or Path("studies") / spec.name).absolute()
    spec = continue_study(folder, spec)
    check_cells(spec)
    states = read_states(folder, spec)
    write_spec(folder, spec)
    with nullcontext() if quiet else Board(spec, states, folder) as board:
        on_change = board.update if board is not None else lambda found: None
        run_local(folder, spec, states, retries=retry, on_change=on_change, environment=child_environment())
    return _report(folder, spec, states)


def _setting(name: str, value: Any) -> Setting:
    words = [item for part in as_typed(value) for item in part.split(",")]
    return Setting(fields_of(Asked)[name], tuple(words), "flag", f"paceline.study({name}=...)")


def _flags(flags: dict[str, Any]) -> list[Setting]:
    for name, function in functions_in(flags):
        if not is_importable(function):
            raise UserError(
                "the runs of a study need functions of a file",
                where=f"paceline.study({name}=...)",
                got=f"{name_of(function)}, which ranks cannot import",
                hint="put it into a FILE.py, and give 'FILE.py:FUNCTION'",
            )
    return as_settings(flags, Path(SOURCE_FILE))


def _report(folder: Path, spec: StudySpec, states: list[CellState]) -> Study:
    failed = {found.cell.name: found.reason for found in states if found.state == "failed"}
    lines = write_report(folder, spec, list(failed.items())) if any(found.measured for found in states) else []
    return Study(folder, states, failed, [line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER)])


class Study:
    """A study: its cells, and what they say about scaling."""

    def __init__(self, folder: Path, states: list[CellState], failed: dict[str, str], answers: list[str]) -> None:
        self.path = folder
        self.failed = failed  # the reason by the name of a cell
        self.answers = answers  # questions and answers, as sentences
        self._states = states

    @property
    def report(self) -> Path:
        """The page for a browser."""
        return self.path / PAGE

    @property
    def table(self) -> Table:
        """A row per cell."""
        return Table(_row(found) for found in self._states)

    def __str__(self) -> str:
        return "\n".join(
            [str(self.table), *(f"failed: {name}: {why}" for name, why in self.failed.items()), *self.answers]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        answers = "".join(f"<li>{html.escape(answer)}</li>" for answer in self.answers)
        return f"{self.table._repr_html_()}<ul>{answers}</ul>"


def _row(found: CellState) -> dict[str, Any]:
    cell, measured = found.cell, found.measured
    row = {"cell": cell.name, "strategy": cell.strategy, "ranks": cell.world_size, "state": found.state}
    if measured is None:
        return row
    return {
        **row,
        "images_per_s": measured.images_per_s,
        "epoch_s": measured.epoch_s,
        "step_ms": 1000 * measured.step_s,
        "test_accuracy": measured.test_accuracy,
    }
