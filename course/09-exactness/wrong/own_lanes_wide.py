# hint: own-lanes-without-tree
# Adds the own lanes in float64.
"""Lesson 9: exactness. Fill the gaps, then: paceline course check 9

A global batch is split into eight lanes; each lane has a gradient. The sum has the same bits on any number of ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def tree_sum(values: list[Tensor]) -> Tensor:
    """The sum of 1, 2, 4, 8, ... tensors: neighbours first, then neighbouring sums, until one is left."""
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def my_lanes(lanes: int, rank: int, world_size: int) -> range:
    """The numbers of this rank's lanes: neighbours, in order."""
    share = lanes // world_size
    return range(rank * share, (rank + 1) * share)


def exact_sum(lane_values: list[Tensor]) -> Tensor:
    """The sum over all lanes of all ranks: one tree for any number of ranks. `lane_values` are this rank's."""
    mine = tree_sum([value.double() for value in lane_values])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return tree_sum(gathered)
