"""A number for each tensor that changes with its bits, computed where the tensor is.

The bits of a tensor are read as whole numbers and summed with odd weights in 64-bit arithmetic that wraps around. Such
sums are exact in any order, so every device gives the same number. A change of one element always changes the sum,
because an odd weight has an inverse. Other changes escape with a probability of about 2**-63.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.data.draws import draw_bits_from, start_of

_DIGEST = 22  # keeps these draws apart from others
_WIDTH = 2**16  # elements that are summed at once
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ABSENT = -1  # for a parameter without a gradient


@torch.no_grad()
def digest_tensors(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """One int64 per tensor, on the device."""
    longest = max((min(tensor.numel(), _WIDTH) for tensor in tensors if tensor is not None), default=0)
    weights = draw_bits_from(torch.arange(longest, device=device), start_of(_DIGEST)) | 1
    absent = torch.full((), ABSENT, dtype=torch.int64, device=device)
    return torch.stack([absent if tensor is None else _digest(tensor, weights) for tensor in tensors])


def _digest(tensor: Tensor, weights: Tensor) -> Tensor:
    words = tensor.detach().reshape(-1).view(_AS_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(words.split(_WIDTH)):
        # An odd factor per part: otherwise two parts could be exchanged.
        total += (part.long() * weights[: len(part)]).sum() * (start_of(_DIGEST, number) | 1)
    return total
