"""The same bits for any number of ranks: gradients are summed over lanes in one fixed binary tree.

A run has a fixed number of lanes, a power of two. A rank has lanes / world_size adjacent lanes and runs them one by
one. Float addition is not associative, but it is commutative and deterministic: the same numbers summed in the same
tree give the same bits on any rank. A rank's lanes form a subtree, which it sums alone. Then the ranks finish the tree
together: each receives one part of the vector from all ranks (all-to-all), sums it, and sends the sum to all ranks
(all-gather). This sends as many bytes as an ordinary all-reduce. Ranks on the CPUs of one node do the same in shared
memory, with the same bits.

BatchNorm's running statistics are part of the same vector. Each lane starts from the statistics at the beginning of
the step, and the new ones are the mean over lanes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.collectives import tree_sum
from paceline.parallel.node_sum import open_node_sum
from paceline.parallel.presence import PIGGYBACKED_SCALARS, Presence
from paceline.runtime.detect import World


class LaneReducer:
    """Collects the gradients of each lane's backward pass and replaces them by the sum over all lanes."""

    def __init__(self, model: nn.Module, world: World, lanes: int) -> None:
        self._world = world
        self._lanes = lanes
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._counters = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
        self._presence = Presence(self._parameters)
        size = (
            sum(tensor.numel() for tensor in (*self._parameters, *self._buffers))
            + PIGGYBACKED_SCALARS
            + self._presence.size
        )
        self._padding = -size % world.world_size
        self._node_sum = open_node_sum(size + self._padding, world)
        self._subtrees: list[tuple[int, Tensor]] = []  # (height, sum), left to right
        self._start: list[Tensor] = []
        self._present = torch.empty(0)  # of the last step, summed over lanes

    @property
    def lanes_per_rank(self) -> int:
        return self._lanes // self._world.world_size

    @property
    def is_shared(self) -> bool:
        """Whether the ranks finish the tree in shared memory."""
        return self._node_sum is not None

    @torch.no_grad()
    def begin_step(self) -> None:
        self._start = [buffer.clone() for buffer in (*self._buffers, *self._counters)]

    @torch.no_grad()
    def begin_lane(self) -> None:
        """Every lane starts without gradients and with the same running statistics."""
        for parameter in self._parameters:
            parameter.grad = None
        for buffer, value in zip((*self._buffers, *self._counters), self._start, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def end_lane(self, piggybacked_scalars: Tensor) -> None:
        """Add this lane's gradients, and the scalars `piggybacked_scalars`, to the tree.

        Two complete subtrees of the same height are summed into a higher one.
        """
        parts = [
            (parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)).reshape(-1)
            for parameter in self._parameters
        ]
        parts += [buffer.reshape(-1).to(torch.float32) for buffer in self._buffers]
        parts += [
            piggybacked_scalars.to(parts[0]),
            self._presence.mine().to(parts[0]),
            parts[0].new_zeros(self._padding),
        ]
        vector, height = torch.cat(parts), 0
        while self._subtrees and self._subtrees[-1][0] == height:
            vector = self._subtrees.pop()[1] + vector
            height += 1
        self._subtrees.append((height, vector))

    @torch.no_grad()
    def end_step(self) -> Tensor:
        """Finish the tree over ranks and write back gradients and statistics.

        Returns the mean of the scalars over all lanes, followed by a value that is not 0 if some lane misses a
        gradient: see `drop_absent`.
        """
        ((_, vector),) = self._subtrees
        self._subtrees.clear()
        if self._world.world_size > 1:
            vector = self._finish_tree(vector)
        position = 0
        for parameter in self._parameters:
            part = vector[position : position + parameter.numel()]
            # In the parameter's own memory layout, as after an ordinary backward pass.
            parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))
            position += parameter.numel()
        for buffer in self._buffers:
            part = vector[position : position + buffer.numel()]
            buffer.copy_(part.view(buffer.shape) / self._lanes)
            position += buffer.numel()
        self._present = vector[position + PIGGYBACKED_SCALARS : position + PIGGYBACKED_SCALARS + self._presence.size]
        return vector[position : position + PIGGYBACKED_SCALARS + 1] / self._lanes

    def drop_absent(self) -> None:
        """Call after `end_step`. Removes the gradients of parameters that no lane used."""
        self._presence.drop_absent(self._present)

    def _finish_tree(self, vector: Tensor) -> Tensor:
        ranks = self._world.world_size
        if self._node_sum is not None:
            self._node_sum.mine.copy_(vector)
            self._node_sum.add_up()
            return self._node_sum.total
        everyones = torch.empty_like(vector)
        dist.all_to_all_single(everyones, vector)
        mine = tree_sum(everyones.view(ranks, -1))
        dist.all_gather(list(vector.chunk(ranks)), mine)
        return vector
