"""Measures the data pipeline alone: order, gather, augment, copy to the device. Nothing is trained."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.data.loader import Batch
from paceline.data.order import epoch_order
from paceline.metrics.timing import choose_rounds, gather_numbers, largest_over_ranks, time_rounds
from paceline.parallel.collectives import wait_for_all
from paceline.runtime.detect import World
from paceline.training.components import Components


@dataclass(frozen=True)
class DataResult:
    """Measured on all ranks at the same time, each with its share of the batches."""

    batches: int  # measured on each rank
    rank_batch_size: int
    batch_s: float  # until a rank's share of a batch is on its device; the median of the slowest rank
    batch_p95_s: float
    order_s: float  # once per epoch
    samples_per_s: float  # all ranks together, the epoch's order included
    bytes_per_s: float  # of finished inputs, per rank
    copy_bytes_per_s: float  # of a plain copy in the device's memory, per rank

    @property
    def of_copy(self) -> float:
        return self.bytes_per_s / self.copy_bytes_per_s


def measure_data(components: Components, world: World, copy_bytes_per_s: float, *, seconds: float = 2.0) -> DataResult:
    """Collective. Ranks start together, because they share the machine's memory and disks."""
    plan, config = components.plan, components.plan.config
    batches = endless_batches(components)
    size = next(batches).inputs.nbytes
    rounds = choose_rounds(lambda: next(batches), world, seconds)
    wait_for_all(world)
    times = time_rounds(lambda: next(batches), world.device, rounds)
    started = time.perf_counter()
    epoch_order(len(components.train_data), config.train.seed, 0)
    order_s = largest_over_ranks(time.perf_counter() - started, world)
    everyone = gather_numbers([times.median_s, times.p95_s], world)
    batch_s, p95_s = (max(column) for column in zip(*everyone, strict=True))
    # The median does not include the order, which is made with the first batch of an epoch.
    whole_s = batch_s + order_s / plan.steps_per_epoch
    return DataResult(
        batches=rounds,
        rank_batch_size=plan.rank_batch_size,
        batch_s=batch_s,
        batch_p95_s=p95_s,
        order_s=order_s,
        samples_per_s=config.train.global_batch_size / whole_s,
        bytes_per_s=size / whole_s,
        copy_bytes_per_s=copy_bytes_per_s,
    )


def endless_batches(components: Components) -> Iterator[Batch]:
    """This rank's training batches, epoch after epoch."""
    train = components.plan.config.train
    for epoch in itertools.count():
        yield from components.train_data.train_epoch(
            seed=train.seed, epoch=epoch, global_batch_size=train.global_batch_size, first_step=0
        )
