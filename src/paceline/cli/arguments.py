"""Words and flags of the verbs that look at runs, and the run a person means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.catalog import JOB, find_by_job
from paceline.runs.folder import RUNS, RunFolder, require_run_folder


def read_words(
    arguments: list[str], *, switches: tuple[str, ...] = (), valued: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """What is no flag, in order, and the flags with their values."""
    words: list[str] = []
    flags: dict[str, str] = {}
    tokens = list(arguments)
    while tokens:
        token = tokens.pop(0)
        name, has_value, value = token.partition("=")
        if not token.startswith("-"):
            words.append(token)
        elif token in switches:
            flags[token] = ""
        elif name in valued:
            if not has_value and not tokens:
                raise UserError(f"{name} needs a value", where="the command line")
            flags[name] = value if has_value else tokens.pop(0)
        else:
            known = (*switches, *valued)
            raise UserError(
                f"unknown flag {token!r}", allowed=", ".join(known) or "none", hint=perhaps(name, known) or None
            )
    return words, flags


def perhaps(given: str, known: Iterable[str]) -> str:
    """The nearest of what exists, as a question back; empty where nothing is near."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"perhaps you meant {close[0]}" if close else ""


def find_run(name: str) -> RunFolder:
    """A path, the name of a folder in runs/ or the beginning of only one, or the job it was submitted as."""
    path = next((path for path in (Path(name), RUNS / name) if path.is_dir()), None) or _by_beginning(name)
    path = path or find_by_job(RUNS, name) or Path(name)
    if not (path / JOB).is_file() and not (path / "status.json").is_file():
        require_run_folder(path)
    return RunFolder(path)


def _by_beginning(name: str) -> Path | None:
    if not name or "/" in name or not RUNS.is_dir():
        return None
    found = [path for path in RUNS.iterdir() if path.name.startswith(name) and path.is_dir()]
    return found[0] if len(found) == 1 else None
