"""Mixup and CutMix: each sample is mixed with its neighbour in the epoch's order.

Samples 2k and 2k+1 of a global batch are partners. The order is a random permutation, so partners are random. Both
are in the share of one rank, so no pixel travels, and the pairs are the same on any number of ranks. Weights and boxes
are drawn per sample from (seed, epoch, sample).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.draws import draw_sequence, unit

NOT_MIXED = -1  # instead of random bits: the sample stays as it is
_QUANTILES = 4096


@dataclass(frozen=True)
class Mixing:
    """Which samples are mixed, and how. An alpha of 0 switches its method off."""

    mixup_alpha: float
    cutmix_alpha: float
    cutmix_share: float  # of the samples, where both methods are on
    num_classes: int

    def mix(self, inputs: Tensor, labels: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed inputs, and soft targets [B, classes]. `bits` are 64 random bits per sample, or NOT_MIXED."""
        partner = torch.arange(len(labels), device=labels.device) ^ 1
        numbers = torch.arange(4, device=bits.device)[:, None]
        method, quantile, row, column = unit(draw_sequence(bits[None], numbers)).unbind(0)
        is_cut = method < self._share_of_cutmix
        weight = torch.where(
            is_cut, beta_quantile(quantile, self.cutmix_alpha), beta_quantile(quantile, self.mixup_alpha)
        )
        weight = torch.where(bits == NOT_MIXED, torch.ones_like(weight), weight)
        inside, area = _boxes(weight, row, column, inputs.shape[2], inputs.shape[3])
        others = inputs[partner]
        blended = weight.to(inputs.dtype)[:, None, None, None]
        mixed = torch.where(
            is_cut[:, None, None, None],
            torch.where(inside[:, None], others, inputs),
            inputs * blended + others * (1 - blended),
        )
        own = torch.where(is_cut, 1 - area, weight).float()[:, None]
        classes = F.one_hot(labels, self.num_classes).float() if labels.dim() == 1 else labels
        return mixed, classes * own + classes[partner] * (1 - own)

    @property
    def _share_of_cutmix(self) -> float:
        if not self.mixup_alpha:
            return 1.0
        return self.cutmix_share if self.cutmix_alpha else 0.0


def hard_labels(targets: Tensor) -> Tensor:
    """The class of each sample; of a mixed sample, the class with the largest share."""
    return targets if targets.dim() == 1 else targets.argmax(1)


def _boxes(weight: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Which pixels come from the partner, [B, H, W], and their share of the picture after clipping at the borders."""
    share = (1 - weight).sqrt()
    inside = []
    for centre, size in ((row, height), (column, width)):
        half = torch.floor(share * size / 2)
        middle = torch.floor(centre * size)
        axis = torch.arange(size, device=weight.device).double()
        inside.append((axis >= (middle - half)[:, None]) & (axis < (middle + half)[:, None]))
    area = inside[0].double().mean(1) * inside[1].double().mean(1)
    return inside[0][:, :, None] & inside[1][:, None, :], area


def beta_quantile(uniform: Tensor, alpha: float) -> Tensor:
    """The quantile of the distribution Beta(alpha, alpha), from a table with linear interpolation."""
    if alpha == 0:
        return torch.ones_like(uniform)
    table = _beta_table(alpha, uniform.device)
    place = uniform * _QUANTILES
    index = place.long()
    return torch.lerp(table[index], table[index + 1], place - index)


@lru_cache(maxsize=16)
def _beta_table(alpha: float, device: torch.device) -> Tensor:
    """Quantiles at equal steps. Cached: copying to a GPU for every batch would synchronise with it."""
    # The half above the median follows by symmetry.
    if alpha <= 1:
        # The density has poles at 0 and 1. With x = s ** (1 / alpha) the integrand has none at 0.
        power = 1 / alpha
        place = np.linspace(0.0, 0.5**alpha, 20_001)
        density = (1 - place**power) ** (alpha - 1)
    else:
        # The density has one maximum, at the median.
        power = 1.0
        place = np.linspace(0.0, 0.5, 20_001)
        density = (4 * place * (1 - place)) ** (alpha - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(place))])
    lower = np.interp(np.linspace(0.0, mass[-1], _QUANTILES // 2 + 1), mass, place) ** power
    return torch.from_numpy(np.concatenate([lower, 1 - lower[-2::-1]])).to(device)
