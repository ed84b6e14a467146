"""The run a person means."""

from __future__ import annotations

from pathlib import Path

from paceline.runs.catalog import JOB, find_by_job
from paceline.runs.folder import RUNS, RunFolder, require_run_folder


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
