"""The pipeline: pixels, partners and targets depend only on (seed, epoch, sample). Bad settings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.ranks import make_world, run_ranks
from harness.runs import quick_config, read_results, step_losses, train_in
from paceline.data.augment import build_pipeline
from paceline.data.crops import random_boxes
from paceline.data.dataset import DatasetInfo, ResidentDataset
from paceline.data.draws import draw_bits
from paceline.data.loader import Loader
from paceline.data.mixing import NOT_MIXED, Mixing, beta_quantile
from paceline.errors import UserError
from paceline.settings.load import load_config
from paceline.settings.rules import check_config, check_world

EVERYTHING = (
    *("--augment", "resized-crop", "--image-size", "32", "--crop-scale", "0.3", "--interpolation", "bicubic"),
    *("--policy", "randaugment", "--policy-std", "0.5", "--vertical-flip", "--color-jitter", "0.4"),
    *("--hue-jitter", "0.1", "--grayscale", "0.2", "--blur", "0.2", "--solarize", "0.2", "--erase", "0.25"),
    *("--cutout", "4", "--mixup-alpha", "0.2", "--cutmix-alpha", "1.0", "--mix-epochs", "1"),
)
SOFT_ONLY = """
def loss(logits, labels):
    return (logits[range(len(labels)), labels] * -1.0).mean()
"""


def make_loader(flags: tuple[str, ...], rank: int, ranks: int) -> Loader:
    config = quick_config(*flags)
    samples = torch.randint(0, 256, (96, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    info = DatasetInfo("made", 96, 0, tuple("abcd"), (3, 32, 32), (0.5,) * 3, (0.2,) * 3)
    data = ResidentDataset(samples, torch.arange(96) % 4)
    return Loader(data, torch.arange(96), build_pipeline(config.data, info, 7), make_world(rank, ranks))


@pytest.mark.parametrize("epoch", [0, 1])
def test_all_ranks_together_have_the_samples_of_one_rank(epoch: int) -> None:
    batches = {}
    for ranks in (1, 2, 4):
        parts = [
            list(
                make_loader(EVERYTHING, rank, ranks).train_epoch(
                    seed=7, epoch=epoch, global_batch_size=16, first_step=0
                )
            )
            for rank in range(ranks)
        ]
        batches[ranks] = [
            (torch.cat([part.inputs for part in step]), torch.cat([part.labels for part in step]))
            for step in zip(*parts, strict=True)
        ]
    assert len(batches[1]) == 6
    for ranks in (2, 4):
        for (inputs, targets), (one, alone) in zip(batches[ranks], batches[1], strict=True):
            assert torch.equal(inputs, one)
            assert torch.equal(targets, alone)
    targets = torch.cat([targets for _, targets in batches[1]])
    assert torch.allclose(targets.sum(1), torch.ones(96))  # float32 shares: their sum is rounded
    is_mixed = targets.max(1).values < 1
    assert is_mixed.any() == (epoch == 0)  # --mix-epochs 1


@pytest.mark.long
def test_all_augmentations_have_the_same_bits_on_any_number_of_ranks_and_after_a_stop(tmp_path: Path) -> None:
    flags = ("--exact", "--lanes", "4", *EVERYTHING)
    for ranks in (1, 2, 4):
        run_ranks(ranks, train_in, str(tmp_path / str(ranks)), flags)
    run_ranks(2, train_in, str(tmp_path / "stopped"), (*flags, "--max-steps", "7"))
    run_ranks(4, train_in, str(tmp_path / "stopped"), flags, True)
    results = [read_results(tmp_path / name) for name in ("1", "2", "4", "stopped")]
    assert len({(one["weights_sha256"], one["optimizer_sha256"]) for one in results}) == 1
    assert step_losses(tmp_path / "1") == step_losses(tmp_path / "4")


def test_boxes_are_inside_and_have_the_requested_areas_and_ratios() -> None:
    boxes = random_boxes(draw_bits(torch.arange(4000), 5), 40, 60, 0.08, 4 / 3)
    top, left, height, width = boxes.double().unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 40).all()
    assert (left + width <= 60).all()
    share, ratio = height * width / 2400, width / height
    assert 0.06 < share.min() < 0.12  # sides are whole pixels
    assert share.max() > 0.8
    assert ratio.min() > 0.65
    assert ratio.max() < 1.55
    assert torch.equal(boxes[7:9], random_boxes(draw_bits(torch.arange(7, 9), 5), 40, 60, 0.08, 4 / 3))


@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.2, 0.8, 1.0, 2.0, 8.0, 100.0])
def test_mixing_weights_have_the_moments_of_the_beta_distribution(alpha: float) -> None:
    weights = beta_quantile((torch.arange(100_000).double() + 0.5) / 100_000, alpha)
    assert abs(weights.mean() - 0.5) < 1e-6
    # The table has 4096 steps.
    assert abs(weights.var() - 1 / (4 * (2 * alpha + 1))) < 1e-4
    assert (weights.diff() >= 0).all()


def test_cutmix_pastes_a_box_of_the_partner_and_targets_have_its_area() -> None:
    inputs = torch.arange(8.0)[:, None, None, None].expand(8, 3, 16, 16).contiguous()
    mixing = Mixing(mixup_alpha=0.0, cutmix_alpha=1.0, cutmix_share=0.5, num_classes=8)
    mixed, targets = mixing.mix(inputs, torch.arange(8), draw_bits(torch.arange(8), 3))
    for number in range(8):
        own = (mixed[number, 0] == number).float().mean()
        assert torch.equal(own, targets[number, number])
        assert torch.equal(1 - own, targets[number, number ^ 1])
    same, hard = mixing.mix(inputs, torch.arange(8), torch.full((8,), NOT_MIXED))
    assert torch.equal(same, inputs)
    assert torch.equal(hard, torch.eye(8))


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--global-batch-size", "6", "--mixup-alpha", "0.2"], "mixup_alpha"),
        (["--mix-epochs", "3"], "mix_epochs"),
        (["--erase", "1.5"], "erase"),
        (["--crop-scale", "0"], "crop_scale"),
        (["--policy-magnitude", "31"], "policy_magnitude"),
    ],
)
def test_impossible_settings_are_refused_at_the_start(flags: list[str], field: str) -> None:
    with pytest.raises(UserError) as caught:
        check(flags)
    assert caught.value.where == f"flag --{field.replace('_', '-')}"


def check(flags: list[str]) -> None:
    loaded = load_config("shapes-cnn", flags)
    check_config(loaded)
    check_world(loaded, 2)


def test_augmentations_of_pictures_are_refused_for_vectors() -> None:
    info = DatasetInfo("made", 96, 0, tuple("abcd"), (20,))
    for flag in ("--policy=trivial", "--mixup-alpha=0.2", "--erase=0.5"):
        config = load_config("shapes-cnn", ["--augment=none", flag]).config
        with pytest.raises(UserError, match="images"):
            build_pipeline(config.data, info, 7)


def test_a_loss_that_needs_labels_is_refused_with_mixing(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(SOFT_ONLY)
    with pytest.raises(UserError) as caught:
        train_in(make_world(0, 1), str(tmp_path / "run"), (f"--loss={own}:loss", "--mixup-alpha=0.2"))
    assert caught.value.where is not None
    assert str(own) in str(caught.value.where)
    assert "soft targets" in caught.value.what
