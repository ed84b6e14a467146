"""`paceline bisect`: the first step, layer and sample at which two runs differ, and the cause."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli.command import Command
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError
from paceline.runs.catalog import find_run
from paceline.runs.folder import require_run_folder
from paceline.settings.declare import Arg

if TYPE_CHECKING:
    from paceline.tools.trust.bisect import Bisection

_RUNS = 2


@dataclass(frozen=True)
class Bisect:
    """Find the first step, layer and sample at which two runs differ, and the setting that causes it.

    Stored checkpoints and logged losses say where to begin. Then steps are replayed on this machine. Exit code 0: no
    difference, 1: they differ, 2: they train different models, 3: the data has changed, 4: a checkpoint is damaged.
    """

    run: Annotated[tuple[str, ...], Arg(place="word", completes="run")]
    """Two run folders, or their names in runs/."""
    data_dir: Annotated[Path | None, Arg("PATH")] = None
    """The folder of the data of both runs, if it is not where it was."""
    json: bool = False
    """Print JSON."""


def bisect(settings: Bisect) -> int:
    paths = [find_run(name).path for name in settings.run]
    if len(paths) != _RUNS or paths[0].resolve() == paths[-1].resolve():
        raise UserError(
            "bisect compares two different runs", got=" ".join(settings.run), hint="paceline bisect RUN RUN"
        )
    for path in paths:
        require_run_folder(path)

    from paceline.tools.trust.bisect import bisect_runs  # imports torch: --help must be fast

    def tell(line: str) -> None:
        print(line, file=sys.stderr if settings.json else sys.stdout, flush=True)

    tell(f"A         {paths[0]}\nB         {paths[1]}")
    flags = [f"--data-dir={settings.data_dir}"] if settings.data_dir is not None else []
    found = bisect_runs(paths[0], paths[1], flags, tell)
    if settings.json:
        print(json.dumps(_as_json(found), indent=2, default=str))
    else:
        for line in _describe(found):
            print(line)
    return EXIT_FINISHED if found.is_equal else EXIT_DIFFERENT


def _describe(found: Bisection) -> list[str]:
    if found.is_equal:
        lines = ["equal     no stored checkpoint, logged loss or final weight differs; nothing was replayed"]
        ends = found.window.last_steps
        if ends[0] != ends[1]:
            lines.append(f"note      A ends at step {ends[0]}, B at step {ends[1]}: they are equal as far as both go")
        return lines
    lines = []
    if found.step is None:
        lines.append("first     the replays of both runs are equal: settings and data are not the cause")
    how = "cause    " if found.is_cause_tried else "suspects "
    lines += [f"{how} {one.kind} {one}" for one in found.causes]
    if not found.causes:
        lines.append("cause     nothing recorded differs: a fault of a machine, or code outside of the record")
    lines += [f"note      {note}" for note in found.notes]
    return [*lines, f"replays   {found.replays}"]


def _as_json(found: Bisection) -> dict[str, Any]:
    return {
        "equal": found.is_equal,
        "last_equal_checkpoint": found.window.same,
        "known_to_differ_at": found.window.differs,
        "last_steps": found.window.last_steps,
        "first_step": found.step,
        "place": asdict(found.place) if found.place is not None else None,
        "causes": [asdict(one) for one in found.causes],
        "is_cause_tried": found.is_cause_tried,
        "notes": found.notes,
        "replays": found.replays,
    }


COMMANDS = (Command("bisect", Bisect, bisect),)
