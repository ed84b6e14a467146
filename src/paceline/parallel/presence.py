"""Which parameters have a gradient in a step, agreed by all ranks.

A parameter has one if any rank's samples used it; ranks whose samples did not add zeros. If no rank's did, it stays
without, as in a run on one process: the optimizer leaves it alone, with its momentum and its weight decay. What the
ranks need to know travels with the gradients they exchange anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PASSENGERS = 2  # numbers that travel with the gradients: whether to stop, and the loss


class Presence:
    """Of these parameters. As numbers to be added up over ranks: how many are missing, then a one for each present."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._whole = torch.tensor([0.0] + [1.0] * len(self._parameters), device=device)

    @property
    def size(self) -> int:
        return len(self._whole)

    def mine(self) -> Tensor:
        """What this rank adds. Not to be changed: the usual case is the same tensor every time."""
        return self.of([parameter.grad is not None for parameter in self._parameters])

    def of(self, present: Sequence[bool]) -> Tensor:
        if all(present):
            return self._whole
        numbers = [float(len(present) - sum(present)), *map(float, present)]
        return torch.tensor(numbers, device=self._whole.device)

    def absent(self, total: Tensor) -> list[int]:
        """The numbers of the parameters without a gradient on any rank, from the sum of all that ranks added."""
        return [number for number, ranks in enumerate(total[1:].tolist()) if ranks == 0]

    def drop_absent(self, total: Tensor) -> None:
        """Take away the zeros that stand for gradients no rank has. Call it only if any rank misses one."""
        for number in self.absent(total):
            self._parameters[number].grad = None


class UnusedParameters:
    """Parameters that a backward pass does not reach, and that DDP therefore waits for."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._before: list[tuple[Tensor | None, int]] = []  # gradients of earlier microbatches, and their versions
        self._known: set[tuple[int, ...]] = set()  # sets of parameters that were seen to be out of reach

    def note_gradients(self) -> None:
        """Before the backward pass of the last microbatch."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._before = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def find(self, objective: Tensor) -> list[nn.Parameter]:
        """After it: the ones it left untouched."""
        numbers = tuple(
            number
            for number, (parameter, (gradient, version)) in enumerate(
                zip(self._parameters, self._before or [(None, 0)] * len(self._parameters), strict=True)
            )
            if parameter.grad is gradient and (gradient is None or gradient._version == version)
        )
        if numbers and numbers not in self._known:
            # A function of the user's own may reach a parameter and give it nothing. DDP counts that one as done.
            reached = _reached(objective)
            if any(id(self._parameters[number]) in reached for number in numbers):
                return [self._parameters[number] for number in numbers if id(self._parameters[number]) not in reached]
            self._known.add(numbers)
        return [self._parameters[number] for number in numbers]


def _reached(objective: Tensor) -> set[int]:
    """The parameters at the ends of a graph, by their identity."""
    ends: set[int] = set()
    seen, waiting = set(), [objective.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            ends.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return ends
