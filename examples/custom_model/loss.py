"""Your own loss: a function of (logits, labels) that returns one value per sample, or their mean."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with less weight on samples that are already classified well."""
    surprise = F.cross_entropy(logits, labels, reduction="none")
    certainty = (-surprise).exp()
    return (1 - certainty) ** 2 * surprise
