"""Repeated augmentation: each repeat is a function of (seed, epoch, sample, repeat), on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.ranks import run_ranks
from harness.runs import quick_config, read_results, step_losses, train_in
from paceline.data.augment import Pipeline, build_pipeline
from paceline.data.dataset import Dataset, DatasetInfo, ResidentDataset
from paceline.data.loader import Batch, Loader
from paceline.data.order import samples_of
from paceline.data.sampling import Sampling
from paceline.runtime.detect import World
from paceline.settings.schema import DataConfig
from paceline.training.header import describe_steps
from paceline.training.plan import make_plan

INFO = DatasetInfo("made", 100, 4, ("a", "b", "c"), (3, 16, 16), (0.5,) * 3, (0.2,) * 3)
SAMPLES = torch.randint(256, (100, 3, 16, 16), generator=torch.Generator().manual_seed(0)).byte()
LABELS = torch.arange(100) % 3


class OnDisk:
    """The same samples, not resident: they are read ahead."""

    labels = LABELS

    def __len__(self) -> int:
        return len(LABELS)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return SAMPLES[indices]


def rank(number: int, ranks: int) -> World:
    return World(number, ranks, number, ranks, "a test", "here", "cpu", "gloo", 1)


def batches(repeats: int, ranks: int = 1, epoch: int = 2, dataset: Dataset | None = None) -> list[Batch]:
    """The global batches of an epoch, assembled from the shares of the ranks."""
    config = DataConfig(augment="light", policy="trivial", mixup_alpha=0.4, repeat_augment=repeats)
    pipeline = build_pipeline(config, INFO, 5)
    data = dataset or ResidentDataset(SAMPLES, LABELS)
    shares = [
        list(
            Loader(data, torch.arange(100), pipeline, rank(number, ranks)).train_epoch(
                seed=5, epoch=epoch, global_batch_size=24, first_step=0
            )
        )
        for number in range(ranks)
    ]
    return [
        Batch(
            torch.cat([part.inputs for part in parts]),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.ids for part in parts]),
            wait_s=0,
        )
        for parts in zip(*shares, strict=True)
    ]


@pytest.mark.parametrize("repeats", [1, 2, 3, 4])
def test_any_number_of_ranks_and_both_kinds_of_data_give_the_same_batches(repeats: int) -> None:
    one = batches(repeats)
    assert len(one) == 100 // 24  # the stated length: as many steps as without repeats
    for others in (batches(repeats, 2), batches(repeats, 6), batches(repeats, dataset=OnDisk())):
        for batch, other in zip(one, others, strict=True):
            assert torch.equal(batch.inputs, other.inputs)
            assert torch.equal(batch.labels, other.labels)
            assert torch.equal(batch.ids, other.ids)


def test_a_batch_has_the_requested_repeats_of_each_sample_and_partners_differ() -> None:
    for epoch in range(3):
        keys = Sampling(100).batches(torch.arange(100), 5, epoch, 24, 3)
        assert keys.shape == (4, 24)
        assert len(keys.unique()) == 96
        for row in samples_of(keys):
            assert row.unique(return_counts=True)[1].tolist() == [3] * 8
            assert (row[::2] != row[1::2]).all()
        assert len(samples_of(keys).unique()) == 32


def test_without_repeats_nothing_changes() -> None:
    assert torch.equal(samples_of(torch.arange(50)), torch.arange(50))
    keys = Sampling(100).batches(torch.arange(100), 5, 0, 24)
    assert torch.equal(keys, Sampling(100).batches(torch.arange(100), 5, 0, 24, 1))
    assert keys.max() < 100


def test_the_first_repeat_has_the_pixels_of_a_run_without_repeats() -> None:
    pipeline: Pipeline = build_pipeline(DataConfig(augment="light", policy="trivial", repeat_augment=2), INFO, 5)
    ids = torch.arange(40)
    first, second = (
        pipeline.augment(SAMPLES[ids], pipeline.draw(ids + (number << 40), pipeline.keys_of(3))) for number in (0, 1)
    )
    assert torch.equal(first, pipeline.for_training(SAMPLES[ids], ids, 3))
    assert (first != second).flatten(1).any(1).float().mean() > 0.9


def test_the_header_states_the_length_of_an_epoch() -> None:
    config = quick_config("--repeat-augment=4")
    info = DatasetInfo("made", 640, 4, ("a", "b"), (3, 32, 32), (0.5,) * 3, (0.2,) * 3)
    plan = make_plan(config, info, 1)
    assert plan.steps_per_epoch == 576 // 64
    assert "144 samples, different ones each time, 4 times each" in describe_steps(plan)


@pytest.mark.long
def test_exact_runs_on_one_and_two_ranks_are_equal_bit_for_bit(tmp_path: Path) -> None:
    model = ("--exact", "--lanes=2", "--model-name=harness.batchnorm_model:build")
    flags = (*model, "--repeat-augment=2", "--cutmix-alpha=1")
    for ranks in (1, 2):
        run_ranks(ranks, train_in, str(tmp_path / str(ranks)), flags)
    assert step_losses(tmp_path / "1") == step_losses(tmp_path / "2")
    one, two = (read_results(tmp_path / str(ranks))["weights_sha256"] for ranks in (1, 2))
    assert one == two
