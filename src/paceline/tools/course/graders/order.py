"""Lesson 3: who sees which sample, and when."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item

_SAMPLES = 40
_EPOCHS = 3


def _visit(person: ModuleType, rank: int, world_size: int, seed: int) -> list[list[int]]:
    sampler = person.make_sampler(_SAMPLES, rank, world_size, seed)
    return [[int(sample) for sample in epoch] for epoch in person.visit(sampler, _EPOCHS)]


def check_shards(path: Path) -> None:
    for world_size in (2, 4):
        ranks = on_ranks(path, world_size, _visit, 7)
        if any(len(epochs) != _EPOCHS for epochs in ranks):
            raise Failed("wrong-epochs", f"visit() gave {len(ranks[0])} epochs, not {_EPOCHS}", "One list per epoch.")
        for epoch in range(_EPOCHS):
            _check_one_epoch([epochs[epoch] for epochs in ranks], epoch)


def _check_one_epoch(shares: list[list[int]], epoch: int) -> None:
    everything = set(range(_SAMPLES))
    joined = [sample for share in shares for sample in share]
    if sorted(joined) == sorted(everything):
        return
    seen = f"in epoch {epoch} {len(shares)} ranks saw {len(joined)} samples, {len(set(joined))} different ones"
    if all(set(share) == everything for share in shares):
        raise Failed(
            "whole-data-everywhere",
            f"{seen}: each rank went through all {_SAMPLES}",
            "An epoch on several ranks then trains on everything several times. The sampler must know this rank and "
            "the number of ranks.",
        )
    if len(joined) == _SAMPLES:
        raise Failed(
            "seed-per-rank",
            f"{seen}; some were seen twice and some never",
            "All ranks must shuffle the same way and then take different parts. If the rank is part of the seed, "
            "each cuts its share out of an order of its own.",
        )
    raise Failed("wrong-shards", seen, "Together the ranks see every sample once per epoch.")


def check_shuffling(path: Path) -> None:
    first, again, other = (on_ranks(path, 2, _visit, seed)[0] for seed in (7, 7, 8))
    in_order = [sorted(epoch) for epoch in first]
    if first == in_order:
        raise Failed("never-shuffled", f"the first samples are {first[0][:5]}", "shuffle=True.")
    if first[0] == first[1]:
        raise Failed(
            "missing-set-epoch",
            f"epochs 0 and 1 have the same order: {first[0][:5]}... both times",
            "The sampler shuffles by (seed, epoch), and nobody told it the epoch: sampler.set_epoch(epoch) before each "
            "one. Nothing fails without it; the model just sees the same batches again and again.",
        )
    if first != again:
        raise Failed(
            "not-reproducible",
            "two runs with seed 7 had different orders",
            "The order may depend on the seed and the epoch, on nothing else.",
        )
    if first == other:
        raise Failed("seed-ignored", "seeds 7 and 8 gave the same order", "Hand the seed to the sampler.")


def _evaluate(person: ModuleType, rank: int, world_size: int, samples: int) -> list[int]:
    return [int(sample) for sample in person.evaluation_share(samples, rank, world_size)]


def check_evaluation(path: Path) -> None:
    for samples, world_size in ((10, 4), (11, 2), (8, 4)):
        shares = on_ranks(path, world_size, _evaluate, samples)
        joined = [sample for share in shares for sample in share]
        sizes = [len(share) for share in shares]
        what = f"of {samples} samples the {world_size} ranks took {shares}"
        if all(share == list(range(samples)) for share in shares):
            raise Failed("whole-data-everywhere", what, "Each rank takes its own part.")
        if len(set(joined)) < len(joined):
            raise Failed(
                "padded-evaluation",
                f"{what}: {len(joined)} in all",
                "Some samples count twice: rounding shares up, or a DistributedSampler, fills the last ones with "
                "samples from the start. The accuracy is then of a data set nobody has.",
            )
        if len(joined) < samples:
            raise Failed(
                "lost-remainder",
                f"{what}: {samples - len(joined)} are never tested",
                "samples // world_size forgets the remainder. Let the bounds be rank * samples // world_size: they "
                "meet without gaps.",
            )
        if joined != list(range(samples)) or max(sizes) - min(sizes) > 1:
            raise Failed("uneven-shares", what, "Neighbouring shares whose sizes differ by one at most.")


ITEMS = (
    Item("on 2 and 4 ranks every sample is seen once per epoch", check_shards, ("make_sampler", "visit")),
    Item("each epoch has its own order, and a seed repeats it", check_shuffling, ("make_sampler", "visit")),
    Item(
        "evaluation sees every sample once, also where ranks do not divide it", check_evaluation, ("evaluation_share",)
    ),
)
