"""A new run from the weights of another: whatever fits by name and shape, and a table of what does not."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor, nn

from paceline.checkpoints.format import MANIFEST, step_folders
from paceline.checkpoints.resume import reader_of
from paceline.checkpoints.store import open_checkpoint
from paceline.errors import CheckpointError
from paceline.models.weights import LoadReport, load_matching, read_tensors

_log = logging.getLogger("paceline")
_LISTED = 8


def start_from(model: nn.Module, source: Path) -> None:
    """Copy weights of a run (its best), a checkpoint or a weights file into a fresh model."""
    tensors = read_tensors(source) if source.is_file() else _tensors_of_checkpoint(source)
    report = load_matching(model, tensors, source=str(source))
    _log.info("weights   %d of %d tensors from %s", len(report.loaded), _wanted(report), source)
    for label, names in (
        ("other shape", report.skipped_shape),
        ("only here", report.missing),
        ("only there", report.unexpected),
    ):
        for name in names[:_LISTED]:
            _log.info("  %-12s %s", label, name)
        if len(names) > _LISTED:
            _log.info("  %-12s and %d more", label, len(names) - _LISTED)


def _wanted(report: LoadReport) -> int:
    return len(report.loaded) + len(report.skipped_shape) + len(report.missing)


def _tensors_of_checkpoint(source: Path) -> dict[str, Tensor]:
    """The weights a run would be evaluated with: the moving average where there is one."""
    checkpoint = open_checkpoint(_checkpoint_folder(source))
    tensors: dict[str, Tensor] = {}
    for kind in ("model", "ema"):
        if checkpoint.files_of(kind):
            reader = reader_of(checkpoint, kind)
            tensors.update({name: reader.read(name) for name in reader.shapes})
    return tensors


def _checkpoint_folder(source: Path) -> Path:
    if (source / MANIFEST).exists():
        return source
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    newest = step_folders(folder)[:1]
    for path in (folder / "best", *newest):
        if path.exists():
            return path
    raise CheckpointError("there are no weights here", where=str(source))
