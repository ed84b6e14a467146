"""SHA-256 of a model's weights: two models with the same hash have the same bits."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from paceline.checkpoints.capture import gather_whole, model_tensors
from paceline.parallel.parts import bits


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the tensors' bytes in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(bits(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_model(model: nn.Module) -> str:
    """The hash of the whole state of a model that is not sharded."""
    return hash_tensors(gather_whole(model_tensors(model), "cpu"))
