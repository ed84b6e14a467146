# hint: not-neighbouring
# Every sample once, but dealt out one by one.
"""Lesson 3: order and sharding. Fill the gaps, then: paceline course check 3"""

from collections.abc import Iterable

from torch.utils.data import DistributedSampler


def make_sampler(num_samples: int, rank: int, world_size: int, seed: int) -> DistributedSampler:
    """Shuffles all samples the same way on every rank, and gives each rank its own part."""
    dataset = range(num_samples)  # a sampler needs only the length of the data set
    return DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed)


def visit(sampler: DistributedSampler, epochs: int) -> list[list[int]]:
    """The samples of this rank: one list per epoch, each epoch in a different order."""
    seen = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen.append(list(sampler))
    return seen


def evaluation_share(num_samples: int, rank: int, world_size: int) -> Iterable[int]:
    """Neighbouring samples for this rank: none twice, none left out, sizes that differ by at most one."""
    return range(rank, num_samples, world_size)
