"""Which samples an epoch keeps: a pure function of (seed, epoch, scores)."""

from __future__ import annotations

from collections import Counter

import torch

from paceline.data.keep import select_by
from paceline.data.order import samples_of
from paceline.data.sampling import Sampling
from paceline.settings.keep_rules import count_kept, epoch_length
from paceline.settings.schema import DataConfig

SCORES = torch.rand(100, generator=torch.Generator().manual_seed(5))


def test_every_epoch_takes_the_hardest_samples_and_the_others_in_turn() -> None:
    kept = select_by(SCORES, 30, 10)
    hardest = set(SCORES.topk(30).indices.tolist())
    times: Counter[int] = Counter()
    for epoch in range(7):  # seven epochs take each of the 70 others once
        taken = kept.positions(3, epoch).tolist()
        assert len(set(taken)) == len(taken) == kept.length == 40
        assert hardest <= set(taken)
        times.update(set(taken) - hardest)
    assert set(times.values()) == {1}
    assert len(times) == 70
    assert not torch.equal(kept.positions(3, 0), kept.positions(4, 0))


def test_the_order_of_an_epoch_visits_these_samples_once() -> None:
    kept = select_by(SCORES, 30, 10)
    found = Sampling(100, kept=kept).visits(3, 2)
    assert found.repetitions is None
    assert torch.equal(found.positions.sort().values, kept.positions(3, 2))
    again = Sampling(100, kept=kept).visits(3, 2)
    assert torch.equal(found.positions, again.positions)


def test_equal_scores_and_nan_have_a_fixed_order() -> None:
    kept = select_by(torch.tensor([1.0, 2.0, 1.0, float("nan"), 2.0]), 3, 0)
    assert kept.hardest.tolist() == [3, 1, 4]
    assert kept.positions(0, 5).tolist() == [1, 3, 4]


def test_the_whole_set_and_a_tiny_share() -> None:
    assert epoch_length(DataConfig(), 77) == 77
    assert epoch_length(DataConfig(keep_share=0.5, keep_by="run"), 77) == 38
    for share, random in ((0.5, 0.0), (0.5, 1.0), (0.999, 0.25), (1e-9, 0.5)):
        hardest, others = count_kept(DataConfig(keep_share=share, keep_random=random), 77)
        kept = select_by(torch.rand(77), hardest, others)
        assert len(kept.positions(1, 9).unique()) == kept.length == hardest + others >= 1


def test_excluded_samples_are_not_kept() -> None:
    """Also where they are the hardest: another sample takes their place."""
    excluded = torch.zeros(100, dtype=torch.bool)
    excluded[SCORES.topk(5).indices] = True
    sampling = Sampling(100, kept=select_by(SCORES, 30, 10), excluded=excluded)
    for epoch in range(3):
        batches = sampling.batches(torch.arange(100), 3, epoch, 8)
        assert batches.shape == (5, 8)
        assert not excluded[samples_of(batches)].any()
