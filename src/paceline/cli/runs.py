"""`paceline runs`: every run in a table, and their tags and notes. Reads files, and asks Slurm once if a job waits."""

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
from paceline.errors import EXIT_FINISHED, PacelineError, UserError
from paceline.launch.job_record import read_record
from paceline.metrics.screen import in_words_s, is_live, paint, width_of
from paceline.runs.catalog import STATES, RunEntry, find_run, list_runs
from paceline.runs.folder import RunFolder
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

    best is the accuracy on the test set, or on the validation set if the other is not known (marked with ~). Of a
    multi-label run or a regression it is the metric of its task. A run with the tag keep is not removed by paceline
    clean, unless it is named.
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
    entries = settings.choose(_with_ended_jobs(everything))
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
            print("submitted: it has not started to write; paceline status RUN asks the scheduler")
    elif meant := _meant_command(settings.text):
        what = f"no run matches {' '.join(settings.text)!r}"
        raise UserError(what, where=f"{root}, {len(everything)} searched", hint=f"paceline runs {meant}")
    elif everything:
        print(f"no run in {root} matches ({len(everything)} searched)")
    else:
        print(f"no runs in {root}; paceline train shapes-cnn starts a first one")
    return EXIT_FINISHED


def _with_ended_jobs(entries: list[RunEntry]) -> list[RunEntry]:
    """Runs that have written nothing, although their Slurm job is no longer in the queue, get the state of the job."""
    records = {entry.path: read_record(entry.path) for entry in entries if entry.state == "submitted"}
    jobs = {path: record for path, record in records.items() if record is not None and record.scheduler == "slurm"}
    if not jobs:
        return entries
    from paceline.cli.run_view import look  # only here: the list of runs must be fast
    from paceline.integrations.slurm.client import read_own_queue

    try:
        queued = {cluster: read_own_queue(cluster) for cluster in {record.cluster for record in jobs.values()}}
    except PacelineError:  # no Slurm on this machine, or it does not answer: what is noted here stays
        return entries
    gone = {path for path, record in jobs.items() if record.job_id not in queued[record.cluster]}
    states = {path: look(RunFolder(path)).state for path in gone}
    return [
        replace(entry, state=states[entry.path]) if states.get(entry.path) in STATES else entry for entry in entries
    ]


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
    return {
        "name": entry.name,
        "recipe": entry.recipe,
        "status": entry.state,
        "progress": progress,
        "best": _best(entry),
        "img/s": "" if entry.images_per_s is None else f"{entry.images_per_s:,.0f}",
        "restarts": str(entry.restarts) if entry.restarts else "",
        "age": in_words_s(max(now - entry.updated, 0)),
        "tags": str(entry.notes),
    }


def _best(entry: RunEntry) -> str:
    if entry.test_metric and entry.test_value is not None:
        return f"{entry.test_metric} {entry.test_value:.4g}"
    return "" if entry.accuracy is None else ("~" if entry.test_accuracy is None else "") + f"{entry.accuracy:.2%}"


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
