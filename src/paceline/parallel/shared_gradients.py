"""Averages the gradients of the ranks of one node through shared memory instead of DDP's sockets.

After the backward pass each rank copies its gradients once, into its row. The mean is used in place: the gradients of
the parameters on all ranks are views of the same memory. Only `scale` may write to it.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.parallel.buffers import begin_alike
from paceline.parallel.node_sum import NodeSum, open_node_sum
from paceline.parallel.presence import PIGGYBACKED_SCALARS, Presence
from paceline.runtime.detect import World


def share_gradients(model: nn.Module, world: World) -> SharedGradients | None:
    """None if the ranks share no memory, or a gradient is not float32. Collective."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or any(parameter.dtype != torch.float32 for parameter in parameters):
        return None
    presence = Presence(parameters)
    size = sum(parameter.numel() for parameter in parameters) + PIGGYBACKED_SCALARS + presence.size
    node_sum = open_node_sum(size, world)
    if node_sum is None:
        return None
    begin_alike(model)
    return SharedGradients(parameters, presence, node_sum, world.world_size)


class SharedGradients:
    """The shared gradients of this rank's model."""

    def __init__(self, parameters: list[nn.Parameter], presence: Presence, node_sum: NodeSum, ranks: int) -> None:
        self._parameters = parameters
        self._presence = presence
        self._sum = node_sum
        self._share = 1 / ranks
        self.norm = 0.0  # of all gradients, after the last `average`
        *starts, self._size = accumulate((parameter.numel() for parameter in parameters), initial=0)
        places = list(zip(parameters, starts, strict=True))
        self._mine = [_view(node_sum.mine, start, parameter) for parameter, start in places]
        self._mean = [_view(node_sum.total, start, parameter) for parameter, start in places]
        ends = [self._size, self._size + PIGGYBACKED_SCALARS]
        self._row = [*self._mine, *node_sum.mine.tensor_split(ends)[1:]]
        self._agreed = node_sum.total[self._size : ends[1] + 1]  # the scalars, and the number of missing gradients
        self._present = node_sum.total[ends[1] :]

    @torch.no_grad()
    def average(self, piggybacked_scalars: Tensor) -> Tensor:
        """Replace every gradient by its mean over ranks. Collective.

        Returns the mean of the scalars, followed by a value that is not 0 if some rank misses a gradient: see
        `drop_absent`.
        """
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        torch._foreach_copy_(self._row, [*gradients, piggybacked_scalars, self._presence.mine()])
        self.norm = self._sum.add_up(scale=self._share, measured=self._size)
        for parameter, gradient in zip(self._parameters, self._mean, strict=True):
            parameter.grad = gradient
        return self._agreed.clone()

    def drop_absent(self) -> None:
        """Call after `average`. Removes the gradients of parameters that no rank used."""
        self._presence.drop_absent(self._present)

    def gather(self, numbers: Tensor) -> Tensor:
        """A few numbers of every rank, one row per rank. Collective."""
        return self._sum.gather(numbers)

    def scale(self, factor: float) -> None:
        """Multiply every gradient, once for all ranks. Collective."""
        self._sum.scale(factor)


def _view(flat: Tensor, start: int, parameter: nn.Parameter) -> Tensor:
    """A view of a parameter's place in the vector, in the parameter's own memory layout if that has no gaps."""
    part = flat[start : start + parameter.numel()]
    is_channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    if is_channels_last or parameter.is_contiguous():
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)
