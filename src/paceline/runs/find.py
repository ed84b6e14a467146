"""Find a run by path, name, beginning of a name, or job."""

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
    """Like `find_run`, but returns a path that may not be a run. An existing folder is returned unchanged."""
    path = next((path for path in (Path(name), RUNS / name) if path.is_dir()), None)
    # Try job ids first: a job's number may also be the beginning of several run names.
    return path or find_by_job(RUNS, name) or _by_beginning(name) or Path(name)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


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
            hint=f"{max(found, key=_changed_at).name} is the newest; or more of the name, or a path",
        )
    return found[0] if found else None
