"""The predicted memory of a rank against the tensors and the resident memory of a real step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.runs import quick_config
from paceline.data.registry import describe_dataset
from paceline.training.memory import LiveBytes, MemoryEstimate, estimate_memory
from paceline.training.plan import make_plan

MEASURE = Path(__file__).parent.parent / "harness" / "step_memory.py"


def estimate(*flags: str, world_size: int = 1, strategy: str = "single") -> MemoryEstimate:
    config = quick_config(*flags)
    plan = make_plan(config, describe_dataset(config.data, config.train.seed), world_size)
    return estimate_memory(plan, strategy, is_mixed=False)


def test_live_bytes_follow_tensors() -> None:
    live = LiveBytes()
    with live:
        one = torch.zeros(1000)
        view = one.view(10, 100)
        one += 1
        assert live.now == 4000
        two = one * 2
        assert live.now == 8000
        del two
        assert (live.now, live.peak) == (4000, 8000)
        del one
        assert live.now == 4000  # the view holds the memory
        del view
        assert live.now == 0


def test_what_each_setting_adds() -> None:
    plain = estimate("--optimizer", "nesterov")
    weights = 4 * plain.num_parameters
    assert (plain.weights, plain.gradients, plain.optimizer, plain.averages) == (weights, weights, weights, 0)
    assert estimate("--optimizer", "adamw").optimizer == 2 * weights
    assert estimate("--ema-decay", "0.9").averages == weights
    assert estimate("--exact", "--lanes", "4").exchange == 4 * weights  # lanes 4: three subtrees and a lane
    sharded = estimate("--strategy", "fsdp", world_size=4, strategy="fsdp")
    assert sharded.weights == sharded.gradients == weights // 4
    assert 0 < sharded.exchange <= 3 * weights
    assert estimate(world_size=2, strategy="ddp").exchange == 2 * weights  # this rank's row, and the sum
    less = estimate("--accumulate", "4").activations
    assert less < plain.activations / 2


def test_recomputed_activations_take_less() -> None:
    vit = ("--model-name", "vit-ti16", "--model-args", "patch_size=8", "width=64", "depth=8", "heads=2")
    assert estimate(*vit, "--activation-checkpointing").activations < 0.6 * estimate(*vit).activations


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        ("cifar10-resnet18", "--global-batch-size=64"),
        ("cifar10-cnn", "--model-name=vit-ti16", "--model-args", "patch_size=4", "--optimizer=adamw"),
        ("cifar10-cnn", "--model-name=vgg11", "--global-batch-size=64"),
    ],
    ids=["resnet18", "vit-ti16", "vgg11"],
)
def test_the_prediction_is_within_a_tenth_of_the_resident_memory(model: tuple[str, ...]) -> None:
    flags = ("--dataset=synthetic", "--num-samples=2000", "--input-size=3x32x32", "--augment=none", "--processes=1")
    batch = () if any("batch" in flag for flag in model) else ("--global-batch-size=32",)
    done = subprocess.run(
        [sys.executable, str(MEASURE), *model, *flags, *batch], capture_output=True, text=True, check=True
    )
    predicted, measured = map(int, done.stdout.split())
    assert predicted == pytest.approx(measured, rel=0.1)
