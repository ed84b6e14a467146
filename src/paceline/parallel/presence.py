"""All ranks agree which parameters have a gradient in a step.

A parameter has a gradient if the samples of any rank used it. Ranks whose samples did not use it add zeros. If no rank
used it, it has no gradient, as in a run on one process: the optimizer then does not change it, nor its momentum, and
applies no weight decay. The ranks exchange this information together with the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PIGGYBACKED_SCALARS = 2  # scalars that are reduced together with the gradients: whether to stop, and the loss


class Presence:
    """Which parameters have a gradient, as numbers to sum over ranks: how many are missing, then 0 or 1 for each."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._whole = torch.tensor([0.0] + [1.0] * len(self._parameters), device=device)

    @property
    def size(self) -> int:
        return len(self._whole)

    def mine(self) -> Tensor:
        """What this rank adds. Do not modify it: usually the same tensor is returned every time."""
        return self.of([parameter.grad is not None for parameter in self._parameters])

    def of(self, present: Sequence[bool]) -> Tensor:
        if all(present):
            return self._whole
        numbers = [float(len(present) - sum(present)), *map(float, present)]
        return torch.tensor(numbers, device=self._whole.device)

    def absent(self, total: Tensor) -> list[int]:
        """The indices of parameters without a gradient on any rank, from the sum over ranks."""
        return [number for number, ranks in enumerate(total[1:].tolist()) if ranks == 0]

    def drop_absent(self, total: Tensor) -> None:
        """Remove zero gradients of parameters that no rank used. Call it only if some rank misses a gradient."""
        for number in self.absent(total):
            self._parameters[number].grad = None


class UnusedParameters:
    """Finds parameters that a backward pass does not reach. DDP would wait for them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._before: list[tuple[Tensor | None, int]] = []  # gradients of earlier microbatches, and their versions
        self._known: set[tuple[int, ...]] = set()  # sets of parameters known to be unreachable

    def note_gradients(self) -> None:
        """Call before the backward pass of the last microbatch."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._before = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def find(self, objective: Tensor) -> list[nn.Parameter]:
        """Call after it. Returns the parameters that it did not reach."""
        numbers = tuple(
            number
            for number, (parameter, (gradient, version)) in enumerate(
                zip(self._parameters, self._before or [(None, 0)] * len(self._parameters), strict=True)
            )
            if parameter.grad is gradient and (gradient is None or gradient._version == version)
        )
        if numbers and numbers not in self._known:
            # A user's autograd function may reach a parameter and return no gradient. DDP counts it as done.
            reached = _reached(objective)
            if any(id(self._parameters[number]) in reached for number in numbers):
                return [self._parameters[number] for number in numbers if id(self._parameters[number]) not in reached]
            self._known.add(numbers)
        return [self._parameters[number] for number in numbers]


def _reached(objective: Tensor) -> set[int]:
    """The ids of the parameters that an autograd graph reaches."""
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
