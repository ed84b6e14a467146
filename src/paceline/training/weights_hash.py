"""SHA-256 of a model's weights: two models with the same hash have the same bits."""

from __future__ import annotations

from torch import nn

from paceline.checkpoints.capture import gather_whole, model_tensors
from paceline.checkpoints.ledger import hash_tensors


def hash_model(model: nn.Module) -> str:
    """The hash of the whole state of a model that is not sharded."""
    return hash_tensors(gather_whole(model_tensors(model), "cpu"))
