"""`paceline runs`: every run in a table, and their tags and notes. Reads only files."""

from __future__ import annotations

import difflib
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from paceline.cli.command import Command
from paceline.cli.selected_runs import RunFilter, perhaps
from paceline.errors import EXIT_FINISHED, UserError
from paceline.metrics.screen import in_words_s, is_live, paint, width_of
from paceline.runs.catalog import STATES, RunEntry, list_runs
from paceline.runs.find import find_run
from paceline.runs.notes import check_tag, read_notes, write_notes
from paceline.settings.declare import Arg, Range

SORTS: dict[str, Callable[[RunEntry], tuple[bool, float | int | str]]] = {  # unknown values come last
    "age": lambda entry: (False, -entry.updated),
    "name": lambda entry: (False, entry.name),
    "recipe": lambda entry: (False, entry.recipe),
    "status": lambda entry: (False, STATES.index(entry.state)),
    "progress": lambda entry: (entry.progress is None, -(entry.progress or 0.0)),
    "best": lambda entry: (entry.accuracy is None, -(entry.accuracy or 0.0)),
    "speed": lambda entry: (entry.images_per_s is None, -(entry.images_per_s or 0.0)),
    "restarts": lambda entry: (False, -entry.restarts),
}
_COLUMNS = ("name", "recipe", "status", "progress", "best", "img/s", "restarts", "age", "tags")
_LEFT = ("name", "recipe", "status", "tags")
_DROPPED_FIRST = ("recipe", "restarts", "img/s", "tags", "age", "progress")
_LEAST_TAGS = 12  # columns
_COLOURS = {"running": "green", "starting": "green", "failed": "red", "lost": "red", "silent": "yellow"}


@dataclass(frozen=True)
class Runs(RunFilter):
    """List every run in runs/ in a table, the newest first.

    best is the accuracy on the test set, or on the validation set if the other is not known (marked with ~). A run with
    the tag keep is not removed by paceline clean, unless it is named.
    """

    text: Annotated[tuple[str, ...], Arg(place="word")] = ()
    """Only runs with this text in their name, recipe, tags or note."""
    sort: Literal["age", "name", "recipe", "status", "progress", "best", "speed", "restarts"] = "age"
    """The order of the rows."""
    reverse: bool = False
    """Reverse the order."""
    limit: Annotated[int | None, Range(low=0)] = None
    """At most this many rows."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Tag:
    """Add tags to a run."""

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, or its name in runs/."""
    tag: Annotated[tuple[str, ...], Arg(place="word", completes="tag")]
    """One tag or several."""


@dataclass(frozen=True)
class Untag(Tag):
    """Remove tags from a run."""


@dataclass(frozen=True)
class Note:
    """Write a note for a run. The note "" removes it."""

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, or its name in runs/."""
    text: Annotated[tuple[str, ...], Arg(place="word", many="all")]
    """The note."""


def runs(settings: Runs) -> int:
    root = settings.root
    everything = list_runs(root)
    entries = settings.choose(everything)
    for word in settings.text:
        entries = [e for e in entries if word.lower() in f"{e.name} {e.recipe} {e.notes}".lower()]
    entries.sort(key=SORTS[settings.sort])
    if settings.reverse:
        entries.reverse()
    entries = entries[: settings.limit]
    if settings.json:
        print(json.dumps([entry.to_json() for entry in entries], indent=2))
    elif entries:
        print_table(entries)
        if is_live(sys.stdout) and any(entry.state == "submitted" for entry in entries):
            print("submitted: as noted here; paceline status RUN asks the scheduler")
    elif meant := _meant_command(settings.text):
        what = f"no run matches {' '.join(settings.text)!r}"
        raise UserError(what, where=f"{root}, {len(everything)} searched", hint=f"paceline runs {meant}")
    elif everything:
        print(f"no run in {root} matches ({len(everything)} searched)")
    else:
        print(f"no runs in {root}; paceline train shapes-cnn starts a first one")
    return EXIT_FINISHED


def _meant_command(words: tuple[str, ...]) -> str:
    """`runs taag RUN x` is a search for three words. If nothing is found, a command was probably meant."""
    names = [command.name.split()[1] for command in COMMANDS if " " in command.name]
    close = difflib.get_close_matches(words[0], names, n=1) if len(words) > 1 else []
    return shlex.join([close[0], *words[1:]]) if close else ""


# --- The table --------------------------------------------------------------------------------------------------------


def print_table(entries: list[RunEntry]) -> None:
    now = time.time()
    rows = [dict(zip(_COLUMNS, _COLUMNS, strict=True)), *(_cells(entry, now) for entry in entries)]
    shown = [name for name in _COLUMNS if any(row[name] for row in rows[1:])]
    widths = {name: max(len(row[name]) for row in rows) for name in shown}
    if is_live(sys.stdout):
        widths = fit_columns(widths, width_of(sys.stdout) - 1)
    colours = [None, *(_COLOURS.get(entry.state) for entry in entries)]
    for row, colour in zip(rows, colours, strict=True):
        cells = [_cell(row[name], width, name, colour) for name, width in widths.items()]
        print("  ".join(cells).rstrip())


def _cells(entry: RunEntry, now: float) -> dict[str, str]:
    progress = "" if entry.step is None else f"{entry.step}"
    if entry.last_step and entry.state != "finished":
        progress += f"/{entry.last_step} {int(100 * (entry.progress or 0)):>3}%"
    best = "" if entry.accuracy is None else ("~" if entry.test_accuracy is None else "") + f"{entry.accuracy:.2%}"
    return {
        "name": entry.name,
        "recipe": entry.recipe,
        "status": entry.state,
        "progress": progress,
        "best": best,
        "img/s": "" if entry.images_per_s is None else f"{entry.images_per_s:,.0f}",
        "restarts": str(entry.restarts) if entry.restarts else "",
        "age": in_words_s(max(now - entry.updated, 0)),
        "tags": str(entry.notes),
    }


def fit_columns(widths: dict[str, int], room: int) -> dict[str, int]:
    """In a narrow window some columns are left out, then names are cut."""
    widths = dict(widths)

    def width() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1)

    for name in _DROPPED_FIRST:
        if "tags" in widths:
            most = room - (width() - widths["tags"])  # what the others leave
            widths["tags"] = min(widths["tags"], max(most, _LEAST_TAGS))
        if width() > room:
            widths.pop(name, None)
    widths["name"] = max(widths["name"] - max(width() - room, 0), 8)
    return widths


def _cell(text: str, width: int, name: str, colour: str | None) -> str:
    if len(text) > width:
        # The end of a run's name tells runs apart, the beginning of a note what it says.
        text = f"~{text[-(width - 1) :]}" if name == "name" else f"{text[: width - 1]}~"
    padded = text.ljust(width) if name in _LEFT else text.rjust(width)
    return paint(padded, colour, sys.stdout) if name == "status" else padded


# --- Tags and notes ---------------------------------------------------------------------------------------------------


def add_tags(settings: Tag) -> int:
    path = find_run(settings.run).path
    notes = read_notes(path)
    added = [check_tag(tag) for tag in settings.tag]
    write_notes(path, replace(notes, tags=tuple(dict.fromkeys((*notes.tags, *added)))))
    return _print_notes(path)


def remove_tags(settings: Untag) -> int:
    path = find_run(settings.run).path
    notes = read_notes(path)
    for tag in settings.tag:
        if tag not in notes.tags:
            allowed = ", ".join(notes.tags) or "it has none"
            hint = perhaps(tag, notes.tags)
            raise UserError(f"this run has no tag {tag!r}", where=str(path), allowed=allowed, hint=hint)
    write_notes(path, replace(notes, tags=tuple(tag for tag in notes.tags if tag not in settings.tag)))
    return _print_notes(path)


def write_note(settings: Note) -> int:
    path = find_run(settings.run).path
    write_notes(path, replace(read_notes(path), note=" ".join(" ".join(settings.text).split())))
    return _print_notes(path)


def _print_notes(path: Path) -> int:
    print(f"{path}: {str(read_notes(path)) or 'no tags, no note'}")
    return EXIT_FINISHED


COMMANDS = (
    Command("runs", Runs, runs),
    Command("runs tag", Tag, add_tags),
    Command("runs untag", Untag, remove_tags),
    Command("runs note", Note, write_note),
)
