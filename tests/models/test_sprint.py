"""The parts of cifar10-speedrun: the whitening network, Muon, light augmentation, several views, no validation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from harness.ranks import make_world, run_ranks
from harness.runs import train_in
from paceline.data.augment import Pipeline
from paceline.errors import UserError
from paceline.metrics.recorder import read_rows
from paceline.models.sprint import Sprint
from paceline.runtime.resources import count_gpus_without_torch
from paceline.settings.schema import OptimConfig
from paceline.training.evaluate import average_over_views
from paceline.training.muon import Muon, _together, orthogonal
from paceline.training.schedule import learning_rate

PLAIN = ("--train-split=1", "--augment=gentle", "--test-views=6")
MUON = ("--optimizer=muon", "--base-lr=0.05", "--schedule=linear", "--epochs=1")


def mirrored(kind: str = "gentle") -> Pipeline:
    return Pipeline(kind, 7, (3, 32, 32), 224, flip=True, cutout=0, mean=(0.0,) * 3, std=(1 / 255,) * 3)


def test_the_first_layer_makes_patches_uncorrelated_and_of_equal_size() -> None:
    torch.manual_seed(0)
    inputs = F.avg_pool2d(torch.randn(64, 3, 34, 34), 3, 1)  # neighbours are similar, as in pictures
    model = Sprint("sprint", (3, 32, 32), 10)
    model.look_at(inputs)
    outputs = model.whiten(inputs).permute(1, 0, 2, 3).flatten(1)
    assert torch.equal(outputs[:12], -outputs[12:])
    products = outputs[:12] @ outputs[:12].T / outputs.shape[1]
    # The variance of a direction becomes v / (v + 5e-4): just below one.
    assert torch.allclose(products, torch.eye(12), atol=0.05)


def test_small_pictures_are_refused() -> None:
    with pytest.raises(UserError, match="too small for sprint"):
        Sprint("sprint", (3, 16, 16), 10)


def test_the_wide_network_has_a_shortcut_around_its_last_convolutions() -> None:
    torch.manual_seed(0)
    group: Any = Sprint("sprint-wide", (3, 32, 32), 10).groups[1].eval()
    assert [tuple(conv.weight.shape[:2]) for conv in (group.conv1, group.conv2, group.conv3)] == [
        (512, 128),
        (512, 512),
        (512, 512),
    ]
    inputs = torch.randn(2, 128, 16, 16)
    torch.nn.init.zeros_(group.conv3.weight)
    first = F.gelu(group.norm1(F.max_pool2d(group.conv1(inputs), 2)))
    assert torch.equal(group(inputs), F.gelu(first))


def test_muons_updates_have_equal_singular_values() -> None:
    torch.manual_seed(0)
    for matrices in ([torch.randn(30, 80), torch.randn(30, 80)], [torch.randn(80, 30)]):
        values = torch.linalg.svdvals(torch.stack(orthogonal(matrices)))
        # Three iterations with these coefficients bring singular values near one. Before, they differ by a factor of 4.
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_matrices_of_several_shapes_in_one_group_have_the_same_updates() -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(8, 20), torch.randn(30, 12), torch.randn(16, 16)]
    for together, alone in zip(orthogonal(matrices), (orthogonal([matrix])[0] for matrix in matrices), strict=True):
        assert together.shape == alone.shape
        assert torch.allclose(together, alone, atol=1e-5)  # sums with more zeros may be added in another order


def test_on_a_gpu_small_matrices_are_one_group_and_large_ones_are_grouped_by_shape() -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    shapes = [(64, 24, 3, 3), (512, 512, 3, 3), (256, 64, 3, 3), (10, 256), (512, 512, 3, 3), (256, 256, 3, 3)]
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    assert _together(weights) == [[0], [1, 4], [2], [3], [5]]
    assert _together([weight.as_subclass(OnGpu) for weight in weights]) == [[0, 2, 3, 5], [1, 4]]


def test_muon_normalises_filters_before_batchnorm_and_finds_the_last_layer() -> None:
    torch.manual_seed(0)
    model = Sprint("sprint", (3, 32, 32), 10)
    optimizer = Muon(model, lr=0.0, momentum=0.6, weight_decay=0.0)
    hidden, vectors, last = (group["params"] for group in optimizer.param_groups)
    assert [tuple(weight.shape) for weight in last] == [(10, 256)]
    assert len(hidden) == 6
    assert all(parameter.dim() == 1 for parameter in vectors)
    F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    optimizer.step()
    for weight in hidden:
        assert float(weight.norm().detach()) == pytest.approx(len(weight) ** 0.5, rel=1e-5)


def test_muon_steps_against_the_gradient() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    layers: Any = model
    hidden, bias, last = layers[0].weight, layers[0].bias, layers[1].weight
    optimizer = Muon(model, lr=0.1, momentum=0.6, weight_decay=0.5)
    F.cross_entropy(model(torch.randn(5, 6)), torch.tensor([0, 1, 2, 0, 1])).backward()
    before = [parameter.detach().clone() for parameter in (hidden, bias, last)]
    gradients = [parameter.grad.clone() for parameter in (hidden, bias, last)]
    optimizer.step()
    turned = before[0] * (1 - 0.1 * 0.5) - 0.1 * orthogonal([gradients[0] * 1.6])[0]
    assert torch.allclose(hidden, turned, atol=1e-6)
    for parameter, was, gradient in zip((bias, last), before[1:], gradients[1:], strict=True):
        # Adam's first step has the same size everywhere: the learning rate of its group.
        rate = 0.1 * (0.125 if parameter is bias else 0.01)
        assert torch.allclose(parameter, was - rate * gradient.sign(), atol=1e-6)


@pytest.mark.parametrize("kind", ["gentle", "lively"])
def test_flips_alternate_from_epoch_to_epoch(kind: str) -> None:
    samples = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    samples[..., :16] = 255  # bright on the left
    ids = torch.arange(200)
    left = [mirrored(kind).for_training(samples, ids, epoch)[:, 0, 16, 0] > 0 for epoch in range(4)]
    assert torch.equal(left[0], ~left[1])
    assert torch.equal(left[0], left[2])
    assert 60 < int(left[0].sum()) < 140


@pytest.mark.parametrize(("kind", "border"), [("gentle", 2), ("lively", 4)])
def test_borders_repeat_the_picture(kind: str, border: int) -> None:
    samples = torch.arange(32, dtype=torch.uint8).expand(1, 3, 32, 32).contiguous()
    rows = {
        tuple(row.tolist())
        for e in range(60)
        for row in mirrored(kind).for_training(samples, torch.tensor([3]), e)[0, 0]
    }
    shifted = set()
    for shift in range(-border, border + 1):
        places = [abs(place + shift) for place in range(32)]
        row = [float(min(place, 62 - place)) for place in places]
        shifted |= {tuple(row), tuple(reversed(row))}
    assert rows <= shifted
    assert len(rows) >= 3 * border


def test_views_are_averaged() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 8, 8)

    def corner(images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, :1, 0]

    assert torch.equal(average_over_views(corner, inputs, 1), inputs[:, 0, :1, 0])
    assert torch.equal(average_over_views(corner, inputs, 2), (inputs[:, 0, :1, 0] + inputs[:, 0, :1, 7]) / 2)
    six = inputs[:, 0, 0, [0, 7]].mean(1) / 2 + (inputs[:, 0, 1, [1, 6]].mean(1) + inputs[:, 0, 1, [1, 6]].mean(1)) / 4
    assert torch.allclose(average_over_views(corner, inputs, 6)[:, 0], six)


def test_linear_schedule_ends_at_zero() -> None:
    config = OptimConfig(schedule="linear", warmup_epochs=1.0)
    rates = [learning_rate(s, config=config, peak=1.0, steps_per_epoch=4, total_steps=12) for s in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == [(12 - step) / 8 for step in range(4, 13)]


def test_a_run_on_all_samples_has_no_validation_and_saves_on_schedule(tmp_path: Path) -> None:
    results = train_in(make_world(0, 1), str(tmp_path), (*PLAIN, "--epochs=3", "--save-epochs=2", "--keep-last=9"))
    assert results["best_epoch"] == 0
    assert {row["phase"] for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "epoch"} == {
        "train",
        "test",
    }
    assert results["samples_seen"] == 3 * 640
    saved = sorted(folder.name for folder in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000020", "step-00000030"]  # the second epoch and the last


def test_muon_on_two_ranks_equals_one_rank(tmp_path: Path) -> None:
    alone = train_in(make_world(0, 1), str(tmp_path / "one"), MUON)
    together = run_ranks(2, train_in, str(tmp_path / "two"), MUON)[0]
    # Sums over ranks are in another order, and an orthogonal update amplifies small differences.
    assert together["performance"]["avg_final_loss"] == pytest.approx(alone["performance"]["avg_final_loss"], rel=1e-3)


def test_gpus_are_counted_without_torch() -> None:
    assert count_gpus_without_torch() is None  # torch is importable, so it must answer
    ask = "import sys, paceline.runtime.resources as r; print(r.count_gpus_without_torch(), 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    assert answer[1] == "False"
    if not torch.cuda.is_available() and not Path("/dev/nvidiactl").exists():
        assert answer[0] == "0"
