"""The best checkpoint of a resumed run: pointed at again, or taken along from another run's folder. No torch."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from paceline.checkpoints.format import MANIFEST, STEP_PREFIX, DamagedCheckpoint, step_of
from paceline.checkpoints.store import inspect_checkpoint, point, pointed_at, take_in, temporary_folder
from paceline.runs.patience import is_present

_log = logging.getLogger("paceline")


def adopt_best(source: Path, folder: Path, step: int) -> None:
    """Point `best` at the checkpoint a resumed state calls its best, taken along if it lies in another folder.

    A killed save may have left the link on the one before; a run that went back, on one that is no longer its own.
    Where the best was never saved for want of room, the link stays on the best that was.
    """
    best = source / f"{STEP_PREFIX}{step:08}"
    if source.resolve() != folder.resolve() and is_present(best / MANIFEST):
        best = _copy(best, folder) or best
    if best.parent.resolve() == folder.resolve() and is_present(best / MANIFEST):
        if pointed_at(folder, "best") != folder / best.name:
            point(folder, "best", best)
        return
    current = pointed_at(folder, "best")
    if current is not None and step_of(current) <= step:
        return
    (folder / "best").unlink(missing_ok=True)
    if step > 0:
        _log.warning("warning: the best checkpoint so far, of step %d, is not there any more", step)


def _copy(path: Path, folder: Path) -> Path | None:
    """A checkpoint in another folder, verified there before it gets its name; None if that cannot be."""
    temporary = temporary_folder(folder, step_of(path))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        manifest = inspect_checkpoint(path).manifest
        temporary.mkdir(parents=True)
        for name in (*manifest.files, MANIFEST):
            shutil.copyfile(path / name, temporary / name, follow_symlinks=False)
        return take_in(temporary)
    except (DamagedCheckpoint, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _log.warning("warning: the best checkpoint %s was not taken along: %s", path, error)
        return None
