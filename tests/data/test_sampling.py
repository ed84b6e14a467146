"""Balanced and weighted sampling: pure functions of (seed, epoch), the same on any number of ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from paceline.data.order import epoch_order
from paceline.data.sampling import Sampling, build_sampling
from paceline.errors import UserError

LABELS = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)


def sampling(kind: str, epoch_samples: int = 0) -> Sampling:
    weights = torch.arange(100).double()
    return build_sampling(kind, epoch_samples, LABELS, weights)


@pytest.mark.parametrize("kind", ["uniform", "balanced", "weighted"])
def test_an_epoch_is_a_function_of_seed_and_epoch(kind: str) -> None:
    chosen = sampling(kind, 250)
    first, again = chosen.visits(7, 3), chosen.visits(7, 3)
    assert torch.equal(first.positions, again.positions)
    assert len(first.positions) == 250
    assert not torch.equal(first.positions, chosen.visits(7, 4).positions)
    assert not torch.equal(first.positions, chosen.visits(8, 3).positions)


@pytest.mark.parametrize("kind", ["uniform", "balanced", "weighted"])
def test_repetitions_number_the_visits_of_a_sample(kind: str) -> None:
    """Augmentation draws from (sample, repetition). All visits of an epoch must differ."""
    found = sampling(kind, 450).visits(1, 0)
    assert found.repetitions is not None
    visits = list(zip(found.positions.tolist(), found.repetitions.tolist(), strict=True))
    assert len(set(visits)) == len(visits)
    times = Counter(position for position, _ in visits)
    assert all({r for p, r in visits if p == position} == set(range(n)) for position, n in times.items())


def test_uniform_without_a_length_gives_the_order_of_an_epoch() -> None:
    found = sampling("uniform").visits(5, 2)
    assert torch.equal(found.positions, epoch_order(100, 5, 2))
    assert found.repetitions is None
    assert torch.equal(sampling("uniform", 30).visits(5, 2).positions, epoch_order(100, 5, 2)[:30])


@pytest.mark.parametrize("length", [0, 60, 100, 101, 299])
def test_balanced_visits_every_class_equally_often(length: int) -> None:
    found = sampling("balanced", length).visits(1, 1)
    classes = Counter(LABELS[found.positions].tolist())
    assert sum(classes.values()) == (length or 100)
    assert max(classes.values()) - min(classes.values()) <= 1
    for label in range(3):
        of_class = Counter(position for position in found.positions.tolist() if LABELS[position] == label)
        members = sum(int(other) == label for other in LABELS)
        times = [*of_class.values(), *[0] * (members - len(of_class))]
        assert max(times) - min(times) <= 1


def test_weighted_visits_follow_the_weights() -> None:
    found = sampling("weighted", 200_000).visits(1, 0)
    times = torch.bincount(found.positions, minlength=100).double()
    assert times[0] == 0  # its weight is 0
    expected = 200_000 * torch.arange(100) / 4950
    # Five standard deviations of a binomial count. The draws are fixed, so the test cannot fail by chance.
    assert bool(((times - expected).abs() <= 5 * expected.sqrt() + 1e-9).all())


def test_weights_that_cannot_be_used_are_refused() -> None:
    for weights in (None, torch.zeros(100), torch.full((100,), -1.0), torch.full((100,), float("nan"))):
        with pytest.raises(UserError):
            build_sampling("weighted", 0, LABELS, weights)
