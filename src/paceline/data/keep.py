"""Which samples an epoch keeps under --keep-share, as a pure function of (seed, epoch, scores).

An epoch takes the samples with the highest score, and some of the others in turn: after a few epochs each of them was
taken equally often (or once more). Without them the model would forget easy samples, and a wrong label, which has a
high score, would count more than it does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.draws import draw_permutation

_KEPT = 9  # part of the hash, so draws differ by purpose (1 to 8: order.py, sampling.py)


@dataclass(frozen=True)
class Selection:
    """The samples that epochs keep."""

    hardest: Tensor  # positions of the samples that every epoch takes
    others: Tensor  # positions of the rest, by falling score
    others_per_epoch: int

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return len(self.hardest) + self.others_per_epoch

    def positions(self, seed: int, epoch: int) -> Tensor:
        """The samples of an epoch, ascending."""
        turn = draw_permutation(len(self.others), _KEPT, seed)
        first = epoch * self.others_per_epoch
        places = torch.arange(first, first + self.others_per_epoch) % max(len(self.others), 1)
        return torch.cat([self.hardest, self.others[turn[places]]]).sort().values


def select_by(scores: Tensor, num_hardest: int, others_per_epoch: int) -> Selection:
    """`scores`: one per training sample. Of equal ones the first is taken to be harder; NaN is the hardest."""
    order = scores.sort(descending=True, stable=True).indices
    return Selection(order[:num_hardest], order[num_hardest:], others_per_epoch)
