"""Lesson 3: which rank sees which sample, and when."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

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
            "An epoch on several ranks then trains on every sample several times. The sampler needs this rank and the "
            "number of ranks.",
        )
    if all(share == shares[0] for share in shares):
        raise Failed("same-shard-everywhere", f"{seen}: all ranks have the same share", "Give the sampler this rank.")
    if len(joined) == _SAMPLES and all(len(set(share)) == len(share) for share in shares):
        raise Failed(
            "ranks-shuffle-differently",
            f"{seen}; some were seen by several ranks and some by none",
            "Each rank took its share out of another order. Is the rank part of the seed, or is there no seed? All "
            "ranks must shuffle the same way and then take different parts.",
        )
    raise cause_not_known(seen, "together the ranks see every sample once per epoch.")


def check_shuffling(path: Path) -> None:
    first, again, other = (on_ranks(path, 2, _visit, seed)[0] for seed in (7, 7, 8))
    in_order = [sorted(epoch) for epoch in first]
    if first == in_order:
        raise Failed("never-shuffled", f"the first samples are {first[0][:5]}", "shuffle=True.")
    if first[0] == first[1]:
        raise Failed(
            "missing-set-epoch",
            f"epochs 0 and 1 have the same order: {first[0][:5]}... both times",
            "The sampler shuffles by (seed, epoch) and does not know the epoch. Call sampler.set_epoch(epoch) before "
            "you use it. Without it there is no error, but every epoch has the same batches.",
        )
    if first != again:
        raise Failed(
            "not-reproducible",
            "two runs with seed 7 had different orders",
            "The order may depend only on the seed and the epoch.",
        )
    if first == other:
        raise Failed("seed-ignored", "seeds 7 and 8 gave the same order", "Pass the seed to the sampler: seed=seed.")


def _evaluate(person: ModuleType, rank: int, world_size: int, samples: int) -> list[int]:
    return [int(sample) for sample in person.evaluation_share(samples, rank, world_size)]


def check_evaluation(path: Path) -> None:
    for samples, world_size in ((10, 4), (11, 2), (8, 4)):
        shares = on_ranks(path, world_size, _evaluate, samples)
        joined = [sample for share in shares for sample in share]
        sizes = [len(share) for share in shares]
        if joined != list(range(samples)) or max(sizes) - min(sizes) > 1:
            raise _explain_shares(shares, samples)


def _explain_shares(shares: list[list[int]], samples: int) -> Failed:
    world_size = len(shares)
    joined = [sample for share in shares for sample in share]
    sizes = [len(share) for share in shares]
    what = f"of {samples} samples the {world_size} ranks took {shares}"
    bounds = [rank * samples // world_size for rank in range(world_size + 1)]
    right = [list(range(bounds[rank], bounds[rank + 1])) for rank in range(world_size)]
    if all(share == list(range(samples)) for share in shares):
        return Failed("whole-data-everywhere", what, "Each rank takes its own part.")
    if shares == [share[:-1] for share in right]:
        return Failed(
            "last-one-missing",
            f"{what}: the last sample of each share is missing",
            "range(start, end) does not contain `end`, so `end` is where the next rank starts: do not subtract 1.",
        )
    if shares == [[*share, share[-1] + 1] for share in right]:
        return Failed(
            "one-too-many",
            f"{what}: each share contains the first sample of the next one",
            "range(start, end) does not contain `end`, so `end` is where the next rank starts: do not add 1.",
        )
    if len(set(sizes)) == 1 and set(joined) == set(range(samples)) and len(joined) > samples:
        return Failed(
            "padded-evaluation",
            f"{what}: {len(joined)} in all",
            "Some samples count twice. Equal shares of this size need more samples than there are: rounding up, or a "
            "DistributedSampler, uses some again. The accuracy is then not that of your data set.",
        )
    if joined == list(range(len(joined))) and set(sizes) == {samples // world_size}:
        return Failed(
            "lost-remainder",
            f"{what}: {samples - len(joined)} are never used",
            "samples // world_size leaves out the remainder. Use rank * samples // world_size as the start of a rank.",
        )
    if joined == list(range(samples)):
        return Failed(
            "uneven-shares", what, "The sizes of the shares may differ by one at most: the slowest rank counts."
        )
    if sorted(joined) == list(range(samples)):
        return Failed("not-neighbouring", what, "Every sample is used once, but a rank's samples are not neighbours.")
    return cause_not_known(what, "rank r begins at r * samples // world_size and ends where rank r + 1 begins.")


ITEMS = (
    Item("on 2 and 4 ranks every sample is seen once per epoch", check_shards, ("make_sampler", "visit")),
    Item("each epoch has its own order, and a seed repeats it", check_shuffling, ("make_sampler", "visit")),
    Item(
        "evaluation uses every sample once, also if the ranks do not divide their number",
        check_evaluation,
        ("evaluation_share",),
    ),
)
