"""Saving and restoring the whole training state. Collective: every rank calls, the primary writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints.capture import (
    capture_model,
    capture_optimizer,
    restore_optimizer,
    restore_tensors,
    whole,
)
from paceline.checkpoints.store import Checkpoint, commit, find_checkpoint, remove_leftovers
from paceline.errors import CheckpointError
from paceline.parallel.collectives import wait_for_all
from paceline.world.detect import World


class CheckpointManager:
    """Keeps the checkpoints of one run."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = folder
        self._world = world
        if world.is_primary:
            remove_leftovers(folder)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: dict[str, Tensor],
        state: dict[str, Any],
        *,
        is_best: bool,
        keep: bool,
    ) -> None:
        device = self._world.device
        payload = {
            "model": capture_model(model, device),
            "optimizer": capture_optimizer(model, optimizer, device),
        }
        if average:
            payload["ema"] = {name: whole(value, device) for name, value in average.items()}
        if self._world.is_primary:
            commit(self._folder, payload, state, is_best=is_best, keep=keep)
        wait_for_all(self._world)

    def best(self) -> Checkpoint | None:
        path = self._folder / "best"
        return find_checkpoint(path) if path.exists() else None


def restore_training(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]
) -> None:
    """Weights, optimizer and moving average of a checkpoint, into live objects."""
    _restore(checkpoint, model.state_dict(), checkpoint.tensors("model"))
    restore_optimizer(model, optimizer, checkpoint.tensors("optimizer"))
    if average:
        _restore(checkpoint, average, checkpoint.tensors("ema"))


def restore_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """The weights to evaluate with: the moving average where there is one, else the weights."""
    tensors = checkpoint.tensors("model")
    if (checkpoint.path / "ema.safetensors").exists():
        tensors.update(checkpoint.tensors("ema"))
    _restore(checkpoint, model.state_dict(), tensors)


def _restore(checkpoint: Checkpoint, live: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    try:
        restore_tensors(live, tensors)
    except KeyError as error:
        raise CheckpointError(
            "the checkpoint holds another model",
            where=str(checkpoint.path),
            got=str(error.args[0]),
            hint="resume with the model it was trained with, or start a new run",
        ) from error
