"""What a step counts: the sum of its samples' losses, correct answers, samples. The same float64 bits on any device.

On a GPU the numbers stay where they are, so that nobody waits for them. On a CPU they are plain Python numbers: each
operation on a tensor, however small, costs as much as a thousand multiplications.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostTally:
    """Of a step on a CPU."""

    def __init__(self) -> None:
        self._loss, self._correct, self._samples = 0.0, 0, 0

    def add(self, mean_loss: Tensor, correct: Tensor, samples: int) -> None:
        self._loss += mean_loss.item() * samples
        self._correct += int(correct.item())
        self._samples += samples

    def sums(self) -> Tensor:
        return torch.tensor([self._loss, self._correct, self._samples], dtype=torch.float64)

    def piggybacked_scalars(self, wants_stop: bool) -> Tensor:
        """What this rank tells the others: whether to stop, and its mean loss."""
        return torch.tensor([float(wants_stop), self._loss / self._samples])


class DeviceTally:
    """Of a step on a GPU."""

    def __init__(self, device: str) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, mean_loss: Tensor, correct: Tensor, samples: int) -> None:
        count = torch.full((), samples, dtype=torch.float64, device=self._sums.device)
        self._sums += torch.stack([mean_loss.double() * count, correct.double(), count])

    def sums(self) -> Tensor:
        return self._sums

    def mean_loss(self) -> Tensor:
        return (self._sums[0] / self._sums[2]).float()

    def piggybacked_scalars(self, wants_stop: bool) -> Tensor:
        loss = self.mean_loss()
        return torch.stack([torch.full_like(loss, float(wants_stop)), loss])
