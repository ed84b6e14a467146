"""Lesson 3: order and sharding. Fill the gaps, then: paceline course check 3"""

from collections.abc import Iterable

from torch.utils.data import DistributedSampler


def make_sampler(num_samples: int, rank: int, world_size: int, seed: int) -> DistributedSampler:
    """Shuffles all samples the same way on every rank, and gives each rank its own part."""
    dataset = range(num_samples)  # a sampler only asks how long the data set is
    return DistributedSampler(dataset, num_replicas=..., rank=..., shuffle=..., seed=...)  # TODO


def visit(sampler: DistributedSampler, epochs: int) -> list[list[int]]:
    """The samples this rank sees: one list per epoch, each epoch in an order of its own."""
    seen = []
    for epoch in range(epochs):
        ...  # TODO: one line; without it all epochs are alike
        seen.append(list(sampler))
    return seen


def evaluation_share(num_samples: int, rank: int, world_size: int) -> Iterable[int]:
    """Neighbouring samples for this rank: nothing twice, nothing forgotten, sizes that differ by one at most."""
    start = ...  # TODO: multiply first, then divide: that way the bounds of neighbours meet
    end = ...  # TODO
    return range(start, end)
