"""What a step counts (losses, correct answers, samples), and the sums of an interval of steps.

On a CPU they are plain Python numbers: each operation on a tensor, however small, costs as much as a thousand
multiplications. On a GPU they stay on the device, so the host does not wait for them. Both give the same float64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

Row = list[float] | Tensor  # of a lane: loss, correct answers, samples
Rows = list[list[float]] | Tensor  # of a rank, one per lane


class HostTally:
    """What a step on a CPU counts."""

    def __init__(self) -> None:
        self._loss, self._correct, self._samples = 0.0, 0, 0

    def add(self, mean_loss: Tensor, correct: Tensor, samples: int) -> None:
        self._loss += mean_loss.item() * samples
        self._correct += int(correct.item())
        self._samples += samples

    def sums(self) -> list[float]:
        return [self._loss, self._correct, self._samples]

    def piggybacked_scalars(self, wants_stop: bool | Tensor) -> Tensor:
        """What this rank adds to the exchange: whether to stop, and its mean loss."""
        return torch.tensor([float(wants_stop), self._loss / self._samples])


class DeviceTally:
    """What a step on a GPU counts."""

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

    def piggybacked_scalars(self, wants_stop: bool | Tensor) -> Tensor:
        """`wants_stop`: in a recorded step a tensor, because a recording cannot read the host."""
        loss = self.mean_loss()
        stop = wants_stop if isinstance(wants_stop, Tensor) else torch.full_like(loss, float(wants_stop))
        return torch.stack([stop, loss])


class HostSums:
    """The sums of an interval on a CPU."""

    def __init__(self, lanes: int) -> None:
        self._rows = [[0.0, 0.0, 0.0] for _ in range(lanes)]

    def add(self, rows: Rows) -> None:
        values = rows.tolist() if isinstance(rows, Tensor) else rows  # a recorded step gives a tensor
        for total, row in zip(self._rows, values, strict=True):
            for number, value in enumerate(row):
                total[number] += value

    def take(self, busy_s: float) -> Tensor:
        """The sums, float64, with the seconds of work as a column (in the row of the first lane). Starts anew."""
        seconds = [busy_s, *[0.0] * (len(self._rows) - 1)]
        taken = [[*row, column] for row, column in zip(self._rows, seconds, strict=True)]
        self._rows = [[0.0, 0.0, 0.0] for _ in self._rows]
        return torch.tensor(taken, dtype=torch.float64)


class DeviceSums:
    """The sums of an interval on a GPU."""

    def __init__(self, lanes: int, device: str) -> None:
        self._sums = torch.zeros(lanes, 3, dtype=torch.float64, device=device)

    def add(self, rows: Rows) -> None:
        assert isinstance(rows, Tensor)
        self._sums += rows

    def take(self, busy_s: float) -> Tensor:
        column = torch.zeros_like(self._sums[:, :1])
        column[0] = busy_s
        taken = torch.cat([self._sums, column], dim=1)
        self._sums.zero_()
        return taken
