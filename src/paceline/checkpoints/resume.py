"""Which checkpoint a run goes on from, agreed by all ranks, and its way back into live objects."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoints import store
from paceline.checkpoints.capture import Tensors, restore_optimizer, restore_tensors
from paceline.checkpoints.format import MANIFEST
from paceline.checkpoints.payload import PayloadReader
from paceline.errors import CheckpointError
from paceline.parallel.collectives import broadcast_text
from paceline.world.detect import World

_log = logging.getLogger("paceline")


def choose_checkpoint(source: Path, world: World, *, prefer_best: bool) -> store.Checkpoint | None:
    """The checkpoint behind a path: a named one, or the newest whole one of a run. Collective.

    The primary verifies every bit; the others open what it found. None if a run has no good one left.
    """
    answer: dict[str, str] = {}
    failure: CheckpointError | None = None
    if world.is_primary:
        try:
            answer = _choose(source, prefer_best)
        except CheckpointError as error:
            failure, answer = error, {"error": error.what}
    answer = json.loads(broadcast_text(json.dumps(answer), world))
    if "error" in answer:
        raise failure or CheckpointError(answer["error"])
    if "path" not in answer:
        return None
    return store.read_as_told(Path(answer["path"]))


def _choose(source: Path, prefer_best: bool) -> dict[str, str]:
    if (source / MANIFEST).exists():
        return {"path": str(store.open_checkpoint(source).path)}
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    newest, reports = store.find_newest(folder, prefer_best=prefer_best)
    for report in reports:
        _log.warning("warning: %s", report)
    return {"path": str(newest.path)} if newest else {}


def reader_of(checkpoint: store.Checkpoint, kind: str) -> PayloadReader:
    return PayloadReader(checkpoint.path, checkpoint.files_of(kind))


def restore_training(
    checkpoint: store.Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, average: Tensors
) -> None:
    """Weights, optimizer and moving average of a checkpoint, into live objects."""
    _restore(checkpoint, dict(model.state_dict()), "model")
    restore_optimizer(model, optimizer, reader_of(checkpoint, "optimizer"))
    if average:
        _restore(checkpoint, average, "ema")


def restore_weights(checkpoint: store.Checkpoint, model: nn.Module) -> None:
    """The weights to evaluate with: the moving average where there is one, else the weights."""
    own = dict(model.state_dict())
    _restore(checkpoint, own, "model")
    if checkpoint.files_of("ema"):
        names = reader_of(checkpoint, "ema").shapes
        _restore(checkpoint, {name: value for name, value in own.items() if name in names}, "ema")


def _restore(checkpoint: store.Checkpoint, live: Tensors, kind: str) -> None:
    try:
        restore_tensors(live, reader_of(checkpoint, kind))
    except KeyError as error:
        raise CheckpointError(
            "the checkpoint holds another model",
            where=str(checkpoint.path),
            got=str(error.args[0]),
            hint="give the model it was trained with; --init-from takes over the weights that match",
        ) from error
