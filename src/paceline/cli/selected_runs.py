"""Which runs a command is about: the flags that `paceline runs` and `paceline clean` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.errors import UserError
from paceline.runs.catalog import RunEntry, State
from paceline.runs.folder import RUNS
from paceline.settings.declare import Arg
from paceline.settings.values import closest


@dataclass(frozen=True)
class RunFilter:
    """Fields that other commands inherit."""

    status: Annotated[tuple[State, ...], Arg("S[,S]", many="commas")] = ()
    """Only runs in one of these states. lost: its process is gone. silent: its process cannot be seen from here, and
    has not written for half an hour. submitted: a job that has written nothing yet. Its scheduler is not asked here:
    paceline status RUN asks it, and notes how the job has ended."""
    recipe: Annotated[str | None, Arg("R", completes="recipe")] = None
    """Only runs of this recipe."""
    tag: Annotated[str | None, Arg("T", completes="tag")] = None
    """Only runs with this tag."""
    folder: Annotated[Path | None, Arg("DIR", name="in")] = None
    """Only runs below this folder (runs/ unless given)."""

    @property
    def root(self) -> Path:
        if self.folder is not None and not self.folder.is_dir():
            around = [path.name for path in self.folder.absolute().parent.glob("*") if path.is_dir()]
            meant = perhaps(self.folder.name, around)
            raise UserError("there is no such folder", got=f"--in {self.folder}", hint=meant)
        return self.folder or RUNS

    def choose(self, entries: list[RunEntry]) -> list[RunEntry]:
        """The runs that pass. A tag or recipe that no run has is a mistake."""
        if self.status:
            entries = [entry for entry in entries if entry.state in self.status]
        if self.recipe is not None:
            _require_known(self.recipe, {entry.recipe for entry in entries}, "recipe")
            entries = [entry for entry in entries if entry.recipe == self.recipe]
        if self.tag is not None:
            _require_known(self.tag, {tag for entry in entries for tag in entry.notes.tags}, "tag")
            entries = [entry for entry in entries if self.tag in entry.notes.tags]
        return entries


def _require_known(given: str, known: set[str], what: str) -> None:
    if known and given not in known:
        hint = perhaps(given, known)
        raise UserError(f"no run here has the {what} {given!r}", allowed=", ".join(sorted(known)), hint=hint)


def perhaps(given: str, known: set[str] | tuple[str, ...] | list[str]) -> str | None:
    meant = closest(given, sorted(known))
    return f"perhaps you meant {meant}" if meant else None
