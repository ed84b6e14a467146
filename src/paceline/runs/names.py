"""Names of new run folders: `runs/<recipe>-<date>-<time>`, with `-02`, `-03`, ... if the second is taken."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.file_shapes import ENVIRONMENT
from paceline.runs.folder import RUNS, flush, has_checkpoint
from paceline.runs.json_files import read_object
from paceline.runs.patience import names_in, read_patiently

_STAMP = re.compile(r"-(?P<time>[0-9]{8}-[0-9]{6})(-(?P<number>[0-9]{1,9}))?$")


def propose_run_folder(name: str) -> Path:
    """A folder name that is free now. Nothing is created, so another run may take it."""
    return next(path for path in _candidates(name) if not path.exists())


def claim_run_folder(name: str) -> Path:
    """Create a new folder for one run. mkdir is atomic, so concurrent processes get different folders."""
    path = RUNS
    try:
        for path in _candidates(name):
            with suppress(FileExistsError):
                _make(path)
                return path
    except OSError as error:
        got = error.strerror
        raise UserError(
            "the run folder cannot be created", where=str(path), got=got, hint="--output-dir PATH"
        ) from error
    raise AssertionError("unreachable")


def release_run_folder(path: Path) -> None:
    """Remove a claimed folder if nothing was written into it, and `runs` if it is empty."""
    with suppress(OSError):
        path.rmdir()
        RUNS.rmdir()


def _candidates(name: str) -> Iterator[Path]:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    yield RUNS / stem
    number = 2
    while True:
        yield RUNS / f"{stem}-{number:02}"  # two digits, so that sorting by name sorts by age
        number += 1


def _make(path: Path) -> None:
    """Raises FileExistsError if another run has this name."""
    while True:
        try:
            path.mkdir()
        except FileNotFoundError:  # no `runs` yet, or another process has just removed it
            try:
                RUNS.mkdir()
            except FileExistsError:
                if not RUNS.is_dir():
                    raise NotADirectoryError(20, "runs is not a folder") from None
            else:
                flush(RUNS.parent)  # a checkpoint is durable only if all its parent folders are
        else:
            return


def newest_run_folder(recipe_name: str) -> Path | None:
    """The newest run of this recipe that has a checkpoint.

    The name must be exactly `<recipe>-<time>`: a recipe `sweep` does not match runs of `sweep-3`. A folder that
    records another recipe is skipped.
    """
    # If a run's config.yaml is used as the recipe, its name is the run's name. The new run records the first recipe.
    recipes = (recipe_name, _STAMP.sub("", recipe_name))
    names = read_patiently("looking for runs", RUNS, lambda: names_in(RUNS))
    stamps = {name: _STAMP.fullmatch(name.removeprefix(recipe_name)) for name in names if name.startswith(recipe_name)}
    runs = [(stamp["time"], int(stamp["number"] or 1), RUNS / name) for name, stamp in stamps.items() if stamp]
    for _, _, path in sorted(runs, reverse=True):
        recorded = read_object(path / "environment.json", ENVIRONMENT).get("recipe", recipe_name)
        if recorded in recipes and has_checkpoint(path):
            return path
    return None
