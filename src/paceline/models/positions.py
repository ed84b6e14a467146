"""Position embeddings for another number of patches than they were trained with."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def resize_positions(model: nn.Module, name: str, saved: Tensor) -> Tensor | None:
    """Saved position embeddings [1, prefix + patches, width], interpolated to the model's grid of patches.

    For our own vision transformers and timm's. None for any other tensor, or if it does not fit.
    """
    parts: Any = model
    grid = getattr(getattr(parts, "patch_embed", None), "grid_size", None)
    prefix = getattr(parts, "num_prefix_tokens", None)
    own = getattr(parts, name, None)
    if name != "pos_embed" or grid is None or prefix is None or not isinstance(own, Tensor):
        return None
    if saved.ndim != 3 or own.ndim != 3 or saved.shape[2] != own.shape[2] or own.shape[1] != prefix + math.prod(grid):
        return None
    side = math.isqrt(saved.shape[1] - prefix) if saved.shape[1] > prefix else 0
    if side * side != saved.shape[1] - prefix or not side:
        return None  # a grid that is not square does not follow from its number of patches
    tokens, patches = saved.float().tensor_split([prefix], dim=1)
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(square, size=tuple(grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([tokens, resized.flatten(2).transpose(1, 2)], dim=1).to(saved.dtype)
