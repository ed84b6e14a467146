"""Chooses the checkpoint to continue from, the same on all ranks, and restores it into live objects.

Also: initial weights from another run (`start_from`), and the best checkpoint of a resumed run (`adopt_best`).
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints import store
from paceline.checkpoints.capture import (
    Tensors,
    require_same_model,
    restore_model,
    restore_optimizer,
    restore_tensors,
)
from paceline.checkpoints.format import MANIFEST, STEP_PREFIX, DamagedCheckpoint, step_folders, step_of
from paceline.checkpoints.payload import PayloadReader
from paceline.checkpoints.store import (
    commit_copy,
    inspect_checkpoint,
    open_checkpoint,
    point,
    pointed_at,
    temporary_folder,
)
from paceline.errors import CheckpointError
from paceline.models.weights import load_matching, read_tensors
from paceline.parallel.collectives import broadcast_text
from paceline.runs.patience import is_present, read_patiently
from paceline.runtime.detect import World

_log = logging.getLogger("paceline")
OnDamaged = Callable[[Path], str]
LEFT_IN_PLACE = "it was left as it is"
_LISTED = 8


def choose_checkpoint(
    source: Path, world: World, *, prefer_best: bool, on_damaged: OnDamaged | None = None
) -> store.Checkpoint | None:
    """The checkpoint behind a path: a named one, or the newest complete one of a run. Collective.

    The primary verifies every bit; the others open what it found. None if a run has no good one. Nothing is changed on
    the disk. The owner of a run passes `on_damaged`, which the primary calls for each damaged checkpoint on the way to
    a complete one, and which returns what was done.
    """
    answer = decided_by_primary(world, lambda: _choose(source, prefer_best, on_damaged))
    return store.read_verified(Path(answer["path"])) if "path" in answer else None


def require_checkpoint(source: Path, world: World, *, prefer_best: bool) -> store.Checkpoint:
    """The same for readers; CheckpointError if there is none. Collective."""
    found = choose_checkpoint(source, world, prefer_best=prefer_best)
    if found is not None:
        return found
    folder = checkpoints_of(source)
    num_damaged = len(step_folders(folder)) + len(store.list_damaged(folder))
    if not num_damaged:
        raise CheckpointError(
            "this run has no checkpoint",
            where=str(source),
            hint=f"paceline train {shlex.quote(str(source / 'config.yaml'))} --resume auto starts it again; "
            "a run saves after each epoch, and with --save-steps N every N steps",
        )
    raise CheckpointError(
        "no whole checkpoint of this run is left",
        where=str(folder),
        got=f"{num_damaged} damaged",
        hint="restore one from a copy; paceline checkpoints RUN --verify names what is wrong with each",
    )


def decided_by_primary(world: World, decide: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The answer of the primary on every rank. Its CheckpointError is raised on every rank, too. Collective."""
    answer: dict[str, dict[str, Any]] = {}
    failure: CheckpointError | None = None
    if world.is_primary:
        try:
            answer = {"answer": decide()}
        except CheckpointError as error:
            failure, answer = error, {"error": vars(error)}
    answer = json.loads(broadcast_text(json.dumps(answer, default=str), world))
    if "error" in answer:
        raise failure or CheckpointError(answer["error"].pop("what"), **answer["error"])
    return answer["answer"]


def _choose(source: Path, prefer_best: bool, on_damaged: OnDamaged | None) -> dict[str, str]:
    if read_patiently("looking for checkpoints", source, lambda: is_present(source / MANIFEST)):
        return {"path": str(store.open_checkpoint(source).path)}
    newest, rejected = store.find_newest(checkpoints_of(source), prefer_best=prefer_best)
    is_start = newest is None and on_damaged is not None  # the owner decides about them
    for item in rejected if not is_start else []:
        _log.warning("warning: %s; %s", item, on_damaged(item.path) if on_damaged else LEFT_IN_PLACE)
    return {"path": str(newest.path)} if newest else {}


def checkpoints_of(source: Path) -> Path:
    """The checkpoints folder of a run folder, or the folder itself."""
    inner = source / "checkpoints"
    return inner if read_patiently("looking for checkpoints", source, lambda: is_present(inner)) else source


def reader_of(checkpoint: store.Checkpoint, kind: str) -> PayloadReader:
    return PayloadReader(checkpoint.path, checkpoint.files_of(kind))


def restore_training(
    checkpoint: store.Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, average: Tensors
) -> None:
    """Weights, optimizer and moving average of a checkpoint, into live objects."""
    with _explained(checkpoint):
        restore_model(model, reader_of(checkpoint, "model"))
        restore_optimizer(model, optimizer, reader_of(checkpoint, "optimizer"))
        if average:
            restore_tensors(average, reader_of(checkpoint, "ema"))


def require_fitting_weights(checkpoint: store.Checkpoint, model: nn.Module) -> None:
    """CheckpointError unless a checkpoint has the weights of this model, which may be on the meta device."""
    with _explained(checkpoint):
        require_same_model(model, reader_of(checkpoint, "model"))


def restore_weights(checkpoint: store.Checkpoint, model: nn.Module) -> None:
    """The weights to evaluate with: the moving average where there is one, else the weights."""
    with _explained(checkpoint):
        restore_model(model, reader_of(checkpoint, "model"))
        if checkpoint.files_of("ema"):
            average, own = reader_of(checkpoint, "ema"), model.state_dict()
            restore_tensors({name: own[name] for name in own if name in average.shapes}, average)


@contextmanager
def _explained(checkpoint: store.Checkpoint) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise CheckpointError(
            "the checkpoint holds another model",
            where=str(checkpoint.path),
            got=str(error.args[0]),
            hint="give the model it was trained with; --init-from takes over the weights that match",
        ) from error


def start_from(model: nn.Module, source: Path, *, with_head: bool = True) -> None:
    """Copy weights of a run (its best), a checkpoint or a weights file into a fresh model."""
    tensors = read_tensors(source) if source.is_file() else _tensors_of_checkpoint(source)
    report = load_matching(model, tensors, source=str(source), with_head=with_head)
    _log.info("weights   %d of %d tensors from %s", len(report.loaded), report.wanted, source)
    for label, names in report.parts().items():
        for name in names[:_LISTED]:
            _log.info("  %-16s %s", label, name)
        if len(names) > _LISTED:
            _log.info("  %-16s and %d more", label, len(names) - _LISTED)


def _tensors_of_checkpoint(source: Path) -> dict[str, Tensor]:
    """The weights a run would be evaluated with: the moving average where there is one."""
    checkpoint = open_checkpoint(checkpoint_folder(source))
    tensors: dict[str, Tensor] = {}
    for kind in ("model", "ema"):
        if checkpoint.files_of(kind):
            reader = reader_of(checkpoint, kind)
            tensors.update({name: reader.read(name) for name in reader.shapes})
    return tensors


def checkpoint_folder(source: Path) -> Path:
    """The checkpoint itself, or the best one of a run or of a folder of checkpoints (the newest if none is best)."""
    if (source / MANIFEST).exists():
        return source
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    newest = step_folders(folder)[:1]
    for path in (folder / "best", *newest):
        if path.exists():
            return path
    raise CheckpointError("there are no weights here", where=str(source))


def adopt_best(source: Path, folder: Path, step: int) -> None:
    """Point `best` at the best checkpoint of a resumed state. Copies it if it is in another folder.

    After a killed save the link may point at the checkpoint before. After a rewind it may point at a checkpoint that
    the run has left. If the best checkpoint was not saved because the disk was full, the link is not changed.
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
        return commit_copy(temporary)
    except (DamagedCheckpoint, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _log.warning("warning: the best checkpoint %s was not taken along: %s", path, error)
        return None
