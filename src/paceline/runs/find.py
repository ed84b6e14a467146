"""The run a person means."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UserError
from paceline.runs.catalog import JOB, find_by_job
from paceline.runs.folder import RUNS, RunFolder, require_run_folder

_MOST_NAMED = 6


def find_run(name: str) -> RunFolder:
    """A path, the name of a folder in runs/ or the beginning of only one, or the job it was submitted as."""
    path = locate_run(name)
    if not (path / JOB).is_file() and not (path / "status.json").is_file():
        require_run_folder(path)
    return RunFolder(path)


def locate_run(name: str) -> Path:
    """The same as a path, which may be no run. The path of a folder is taken as it is."""
    path = next((path for path in (Path(name), RUNS / name) if path.is_dir()), None)
    # A job before a beginning: its number may also begin the name of several runs.
    return path or find_by_job(RUNS, name) or _by_beginning(name) or Path(name)


def _by_beginning(name: str) -> Path | None:
    if not name or "/" in name or not RUNS.is_dir():
        return None
    found = sorted(path for path in RUNS.iterdir() if path.name.startswith(name) and path.is_dir())
    if len(found) > 1:
        names = [path.name for path in found]
        raise UserError(
            f"{len(names)} runs begin with {name!r}",
            where=str(RUNS),
            got=", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else ""),
            hint="more of the name, or a path",
        )
    return found[0] if found else None
