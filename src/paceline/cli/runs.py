"""`paceline runs`: every run in a table, and the tags and notes people put on them. Reads plain files, asks nobody."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.cli.arguments import perhaps, read_words
from paceline.errors import EXIT_FINISHED, UserError
from paceline.metrics.screen import in_words_s, is_live, paint, width_of
from paceline.runs.catalog import STATES, RunEntry, list_runs
from paceline.runs.find import find_run
from paceline.runs.folder import RUNS
from paceline.runs.notes import check_tag, read_notes, write_notes

_USAGE = f"""\
usage: paceline runs [TEXT] [--status S[,S]] [--recipe R] [--tag T] [--sort KEY] [--reverse] [--limit N] [--in DIR]
                     [--json]
       paceline runs tag RUN TAG...
       paceline runs untag RUN TAG...
       paceline runs note RUN "TEXT"

Every run in runs/ (or below DIR), the newest first. TEXT: only runs with it in their name, recipe, tags or note.
--status: {", ".join(STATES)}.
  lost: its process is gone. silent: its process cannot be seen from here, and has not written for half an hour.
  submitted: a job that has written nothing yet. Its scheduler is not asked here: paceline status RUN asks it, and notes
  how the job has ended.
--sort: age, name, recipe, status, progress, best, speed, restarts.
best is the accuracy on the test set, or on validation while that is not known (marked with ~).
A note of "" takes the note away. A run with the tag keep is left alone by paceline clean, unless it is named.
"""
SORTS: dict[str, Callable[[RunEntry], tuple[bool, float | int | str]]] = {  # what is not known comes last
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
_LEAST_TAGS = 12  # columns: less of them says nothing
_COLOURS = {"running": "green", "starting": "green", "failed": "red", "lost": "red", "silent": "yellow"}


def run(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    if arguments and arguments[0] in _CHANGES:
        return _CHANGES[arguments[0]](arguments[1:])
    words, flags = read_words(
        arguments,
        switches=("--json", "--reverse"),
        valued=("--status", "--recipe", "--tag", "--sort", "--limit", "--in"),
    )
    root = read_root(flags)
    everything = list_runs(root)
    entries = choose(everything, words, flags)
    entries.sort(key=SORTS[_one_of(flags.get("--sort", "age"), tuple(SORTS), "--sort")])
    if "--reverse" in flags:
        entries.reverse()
    entries = entries[: _limit(flags)]
    if "--json" in flags:
        print(json.dumps([entry.to_json() for entry in entries], indent=2))
    elif entries:
        print_table(entries)
        if is_live(sys.stdout) and any(entry.state == "submitted" for entry in entries):
            print("submitted: as noted here; paceline status RUN asks the scheduler")
    elif everything:
        print(f"none of the {len(everything)} runs in {root} is like that")
    else:
        print(f"no runs in {root}; paceline train shapes-cnn makes a first one")
    return EXIT_FINISHED


# --- Which ------------------------------------------------------------------------------------------------------------


def read_root(flags: dict[str, str]) -> Path:
    root = Path(flags.get("--in", RUNS))
    if "--in" in flags and not root.is_dir():
        around = [path.name for path in root.absolute().parent.glob("*") if path.is_dir()]
        raise UserError("there is no such folder", got=f"--in {root}", hint=perhaps(root.name, around) or None)
    return root


def choose(entries: list[RunEntry], words: list[str], flags: dict[str, str]) -> list[RunEntry]:
    """What the words and flags leave of these runs. A tag or recipe that no run has is a slip."""
    if "--status" in flags:
        states = [_one_of(name, STATES, "--status") for name in flags["--status"].split(",")]
        entries = [entry for entry in entries if entry.state in states]
    if "--recipe" in flags:
        recipe = _known(flags["--recipe"], {entry.recipe for entry in entries}, "recipe")
        entries = [entry for entry in entries if entry.recipe == recipe]
    if "--tag" in flags:
        tag = _known(flags["--tag"], {tag for entry in entries for tag in entry.notes.tags}, "tag")
        entries = [entry for entry in entries if tag in entry.notes.tags]
    for word in words:
        entries = [e for e in entries if word.lower() in f"{e.name} {e.recipe} {e.notes}".lower()]
    return entries


def _known(given: str, known: set[str], what: str) -> str:
    if known and given not in known:
        raise UserError(
            f"no run here has the {what} {given!r}",
            allowed=", ".join(sorted(known)),
            hint=perhaps(given, known) or None,
        )
    return given


def _one_of(given: str, known: tuple[str, ...], flag: str) -> str:
    if given not in known:
        hint = perhaps(given, known) or None
        raise UserError(f"{flag}: {given!r} is not valid", allowed=", ".join(known), hint=hint)
    return given


def _limit(flags: dict[str, str]) -> int | None:
    text = flags.get("--limit")
    if text is not None and not (text.isascii() and text.isdecimal()):
        raise UserError(f"--limit: {text!r} is not valid", allowed="a whole number")
    return None if text is None else int(text)


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


def _tag(arguments: list[str]) -> int:
    path, tags = _run_and(arguments, "tag RUN TAG...")
    notes = read_notes(path)
    added = [check_tag(tag) for tag in tags]
    write_notes(path, replace(notes, tags=tuple(dict.fromkeys((*notes.tags, *added)))))
    return _say(path)


def _untag(arguments: list[str]) -> int:
    path, tags = _run_and(arguments, "untag RUN TAG...")
    notes = read_notes(path)
    for tag in tags:
        if tag not in notes.tags:
            allowed = ", ".join(notes.tags) or "it has none"
            hint = perhaps(tag, notes.tags) or None
            raise UserError(f"this run has no tag {tag!r}", where=str(path), allowed=allowed, hint=hint)
    write_notes(path, replace(notes, tags=tuple(tag for tag in notes.tags if tag not in tags)))
    return _say(path)


def _note(arguments: list[str]) -> int:
    path, words = _run_and(arguments, 'note RUN "TEXT"')
    write_notes(path, replace(read_notes(path), note=" ".join(" ".join(words).split())))
    return _say(path)


def _run_and(arguments: list[str], usage: str) -> tuple[Path, list[str]]:
    if len(arguments) < 2:
        raise UserError("something is missing", got=" ".join(arguments) or "nothing", hint=f"paceline runs {usage}")
    return find_run(arguments[0]).path, arguments[1:]


def _say(path: Path) -> int:
    print(f"{path}: {str(read_notes(path)) or 'no tags, no note'}")
    return EXIT_FINISHED


_CHANGES = {"tag": _tag, "untag": _untag, "note": _note}
