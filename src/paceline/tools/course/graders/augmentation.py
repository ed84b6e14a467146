"""Lesson 11: random choices that depend on seed, epoch and sample, and on nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known, ranks_text

_ROW, _COLUMN, _FLIP, _MIX = range(4)
_SEED, _EPOCH = 7, 3
_BATCH = [11, 4, 19, 8, 2, 15, 6, 13]  # a global batch of 20 samples
_KEY = (5, 2, 9, 1)  # seed, epoch, sample, choice
_KINDS = ("seed", "epoch", "sample", "choice")
# Keys with the same digits, or the same sum: the text of a wrong key is equal for some of them.
_CLOSE_KEYS = list(itertools.product((0, 1, 2, 10, 11), (0, 1, 2, 10, 11), (0, 1, 2, 10, 11, 101), range(4)))
Draw = Callable[[int, int, int, int], float]


# --- The draws


def _draw(person: ModuleType, rank: int, world_size: int) -> dict[str, list[float]]:
    uniform = person.uniform
    if rank:
        uniform(1, 1, 1, 1)  # a generator with a state has another one now
    others = [[value + (number == place) for number, value in enumerate(_KEY)] for place in range(4)]
    return {
        "again": [uniform(*_KEY), uniform(*_KEY)],
        "other": [uniform(*key) for key in others],
        "close": [uniform(*key) for key in _CLOSE_KEYS],
        "many": [uniform(_SEED, _EPOCH, sample, choice) for sample in range(100) for choice in range(4)],
    }


def check_draws(path: Path) -> None:
    first, second = on_ranks(path, 2, _draw)
    drawn, many = first["again"][0], first["many"]
    if not all(0 <= value < 1 for value in many):
        raise cause_not_known(f"uniform() gave values from {min(many):g} to {max(many):g}", "numbers from 0 up to 1.")
    if first["again"][0] != first["again"][1] or first != second:
        raise Failed(
            "generator-state",
            f"the same four numbers gave {drawn:.4f} and {first['again'][1]:.4f}, and other values on rank 1",
            "A generator has a state: its next number depends on all earlier ones. Compute the number from a hash of "
            "the four numbers, so that any process can compute it again.",
        )
    for kind, value in zip(_KINDS, first["other"], strict=True):
        if value == drawn:
            raise _ignored(kind)
    seen: dict[float, tuple[int, ...]] = {}
    for key, value in zip(_CLOSE_KEYS, first["close"], strict=True):
        if value in seen:
            raise Failed(
                "digits-run-together",
                f"different numbers gave the same draw: {_key_text(seen[value])}; and {_key_text(key)}",
                "Put something between the numbers of the text: '1 11' and '11 1' differ. A sum of them, or of their "
                "products, is not enough.",
            )
        seen[value] = key
    if not 0.4 < sum(many) / len(many) < 0.6 or len(set(many)) < len(many):
        raise cause_not_known(
            f"the mean of {len(many)} draws is {sum(many) / len(many):.3f}", "different numbers with a mean of 0.5."
        )


def _key_text(key: tuple[int, ...]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in zip(_KINDS, key, strict=True))


def _ignored(kind: str) -> Failed:
    if kind == "choice":
        return Failed(
            "choices-linked",
            "all choices of a sample get the same number",
            "Row, column and flip must be independent: a picture that is cut out at the top would always be flipped.",
        )
    why = {
        "seed": "Two runs with different seeds would have the same augmentation.",
        "epoch": "The model would see the same pixels in every epoch: that is no augmentation.",
        "sample": "All samples of an epoch would be cut and flipped in the same way.",
    }
    return Failed(f"{kind}-ignored", f"another {kind} gives the same number", why[kind])


# --- One picture


def _pictures() -> Tensor:
    return torch.arange(20 * 100, dtype=torch.float32).reshape(20, 1, 10, 10)


def _cut(image: Tensor, row: float, column: float, flip: bool, dimension: int = -1) -> Tensor:
    top, left = int(row), int(column)
    part = image[:, top : top + 8, left : left + 8]
    return part.flip(dimension) if flip else part


def _variants(uniform: Draw, image: Tensor, sample: int) -> dict[str, Tensor]:
    """What an answer may be: the right one, and mistakes by name."""
    row, column, flip = (uniform(_SEED, _EPOCH, sample, choice) for choice in (_ROW, _COLUMN, _FLIP))
    is_flipped = flip < 0.5
    found = {
        "": _cut(image, row * 3, column * 3, is_flipped),
        "flip-inverted": _cut(image, row * 3, column * 3, not is_flipped),
        "flipped-upside-down": _cut(image, row * 3, column * 3, is_flipped, -2),
        "never-flipped": _cut(image, row * 3, column * 3, False),
        "always-flipped": _cut(image, row * 3, column * 3, True),
        "rows-and-columns-exchanged": _cut(image, column * 3, row * 3, is_flipped),
    }
    for rows, columns in itertools.product((2, 3, 4), repeat=2):
        found.setdefault(f"place-left-out {rows} {columns}", _cut(image, row * rows, column * columns, is_flipped))
    for number, (a, b, c) in enumerate(itertools.product((row, column, flip), repeat=3)):
        if len({a, b, c}) < 3:
            found[f"one-draw-for-two {number}"] = _cut(image, a * 3, b * 3, c < 0.5)
    return found


def _augment(person: ModuleType, rank: int, world_size: int) -> tuple[list[int], list[str]]:
    """The shape of an answer, and the variants that all answers fit."""
    names: set[str] | None = None
    shape: list[int] = []
    for sample, image in enumerate(_pictures()):
        answer = person.augment(image, _SEED, _EPOCH, sample)
        shape = list(answer.shape)
        fitting = {
            name for name, value in _variants(person.uniform, image, sample).items() if torch.equal(value, answer)
        }
        names = fitting if names is None else names & fitting
    return shape, sorted(names or ())


def check_augment(path: Path) -> None:
    shape, names = on_ranks(path, 1, _augment)[0]
    if "" in names:
        return
    what = f"20 pictures of 1x10x10 became pictures of {'x'.join(map(str, shape))}, and not those of the draws"
    advice = {
        "flip-inverted": "The pictures whose draw is below 0.5 are flipped, the others are not.",
        "flipped-upside-down": "The last dimension is the width: flip(-1) exchanges left and right.",
        "never-flipped": "No picture is flipped. Flip it if uniform(seed, epoch, sample, FLIP) is below 0.5.",
        "always-flipped": "All pictures are flipped. Flip only if uniform(seed, epoch, sample, FLIP) is below 0.5.",
        "rows-and-columns-exchanged": "ROW is the number of the choice of the row, COLUMN that of the column.",
        "place-left-out": "10 - 8 + 1 = 3 places are possible: int(3 * draw) is 0, 1 or 2, each equally often.",
        "one-draw-for-two": "Two choices use one draw, so they are not independent. Each has its own number: ROW, "
        "COLUMN, FLIP.",
    }
    for name, text in advice.items():
        if any(found.split(" ")[0] == name for found in names):
            raise Failed(name, what, text)
    raise cause_not_known(what, "row and column are int(draw * 3), and the part is flipped if the draw is below 0.5.")


# --- A share of a global batch


def _share(person: ModuleType, rank: int, world_size: int) -> str:
    """The name of the mistake; empty for the right answer."""
    images = _pictures()
    samples, answer = person.augmented_share(images, _BATCH, rank, world_size, _SEED, _EPOCH)
    size = len(_BATCH) // world_size
    mine = _BATCH[rank * size : (rank + 1) * size]
    if list(samples) != mine:
        return "wrong-share"
    keys = {
        "": [(sample, _SEED, sample) for sample in mine],
        "keyed-by-position": [(sample, _SEED, place) for place, sample in enumerate(mine)],
        "rank-in-the-key": [(sample, _SEED + rank, sample) for sample in mine],
        "wrong-pictures": [(place, _SEED, sample) for place, sample in enumerate(mine)],
    }
    for name, rows in keys.items():
        wanted = torch.stack([person.augment(images[image], seed, _EPOCH, key) for image, seed, key in rows])
        if torch.equal(wanted, answer):
            return name
    return "cause-not-known"


def check_share(path: Path) -> None:
    for world_size in (1, 2):
        mistakes = [name for name in on_ranks(path, world_size, _share) if name]
        if not mistakes:
            continue
        what = f"on {ranks_text(world_size)} the pictures of a share are not those of augment() with the right keys"
        advice = {
            "keyed-by-position": "The place of a sample in the share changes with the number of ranks, and with the "
            "order. The key is the sample's own number in the data set.",
            "rank-in-the-key": "A sample may be on another rank in the next run, or after a restart. The rank must not "
            "be a part of the key.",
            "wrong-pictures": "images[...] needs the number of the sample, not its place in the share.",
            "wrong-share": "Take neighbouring samples: rank r begins at r times the size of a share (lesson 1).",
        }
        if mistakes[0] in advice:
            raise Failed(mistakes[0], what, advice[mistakes[0]])
        raise cause_not_known(what, "augment(images[sample], seed, epoch, sample) for each sample of the share.")


# --- Mixup


def _mix(person: ModuleType, rank: int, world_size: int) -> str:
    size = len(_BATCH) // world_size
    mine = _BATCH[rank * size : (rank + 1) * size]
    inputs, targets = _pictures()[mine], torch.eye(20)[mine]
    answer = person.mixup(inputs, targets, mine, _SEED, _EPOCH)
    share = torch.tensor([person.uniform(_SEED, _EPOCH, sample, _MIX) for sample in mine])
    partner = torch.arange(len(mine)) ^ 1

    def mixed(own: Tensor, of: Tensor, other: Tensor) -> Tensor:
        weight = own.view(-1, *[1] * (of.dim() - 1))
        return weight * of + (1 - weight) * of[other]

    right = mixed(share, inputs, partner), mixed(share, targets, partner)
    first = share[:1].expand_as(share)
    reversed_ = torch.arange(len(mine)).flip(0)
    variants = {
        "": right,
        "targets-not-mixed": (right[0], targets),
        "shares-exchanged": (right[0], mixed(1 - share, targets, partner)),
        "shares-exchanged (2)": (mixed(1 - share, inputs, partner), right[1]),
        "one-share-for-all": (mixed(first, inputs, partner), mixed(first, targets, partner)),
        "partner-changes-with-ranks": (mixed(share, inputs, reversed_), mixed(share, targets, reversed_)),
    }
    for name, wanted in variants.items():
        # There are several right ways to write the mean, which round differently.
        if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a, b in zip(answer, wanted, strict=True)):
            return name.split(" ")[0]
    return "cause-not-known"


def check_mixup(path: Path) -> None:
    mistakes = [name for name in on_ranks(path, 2, _mix) if name]
    if not mistakes:
        return
    what = "mixed pictures and targets are not the weighted means of neighbours"
    advice = {
        "targets-not-mixed": "A picture that is 70 % cat and 30 % dog has the target 0.7 cat and 0.3 dog.",
        "shares-exchanged": "Pixels and targets are mixed with the same share: of the sample itself, the draw.",
        "one-share-for-all": "The first sample of a share changes with the number of ranks. Each sample has its draw.",
        "partner-changes-with-ranks": "The first and the last sample of a share are partners: on another number of "
        "ranks these are other samples. Neighbours 2k and 2k + 1 are always on one rank.",
    }
    if mistakes[0] in advice:
        raise Failed(mistakes[0], what, advice[mistakes[0]])
    raise cause_not_known(what, "share * own + (1 - share) * partner's, for the pixels and for the targets.")


ITEMS = (
    Item("a draw depends on seed, epoch, sample and choice alone", check_draws, ("uniform",)),
    Item("a picture is cut and flipped by its draws", check_augment, ("uniform", "augment")),
    Item("on 1 and 2 ranks a sample gets the same pixels", check_share, ("uniform", "augment", "augmented_share")),
    Item("neighbours are mixed, with their targets", check_mixup, ("uniform", "mixup")),
)
