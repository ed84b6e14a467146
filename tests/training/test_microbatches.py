"""Microbatches: any split of a rank's share gives the gradient of the complete share."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from harness.ranks import make_world
from harness.runs import quick_config
from paceline.data.dataset import DatasetInfo
from paceline.data.loader import Batch
from paceline.errors import UserError
from paceline.launch.policy import fewest_microbatches, samples_to_cut
from paceline.parallel.apply import ParallelModel
from paceline.settings.schema import Config
from paceline.training.guards import Guards
from paceline.training.optim import build_optimizer
from paceline.training.plan import make_plan
from paceline.training.step import TrainStep

# One float32 gradient differs from the float64 one by a few units in the last place.
TOLERANCE = 1e-6


def gradients_of(samples: int, accumulate: int, dtype: torch.dtype, *flags: str) -> tuple[float, list[Tensor]]:
    """Mean loss and gradients of one step on one rank."""
    config = quick_config("--accumulate", str(accumulate), *flags)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    inputs = torch.randn(samples, 3, 2, 2).to(dtype)
    labels = torch.arange(samples) % 4
    world = make_world(0, 1)
    step = TrainStep(
        ParallelModel(model, model, "single", None), build_optimizer(config.optim, model), None, config, world, Guards()
    )
    report = step.gradients(Batch(inputs, labels, labels, 0.0), 0, wants_stop=False)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return report.mean_loss, [gradient.double() for gradient in gradients]


@pytest.mark.parametrize(("samples", "accumulate"), [(10, 4), (10, 3), (10, 10), (7, 2), (12, 8), (8, 4)])
def test_microbatches_of_any_size_give_the_gradient_of_the_batch(samples: int, accumulate: int) -> None:
    """Every sample has the same weight in the gradient, in any microbatch."""
    loss, found = gradients_of(samples, accumulate, torch.float32)
    whole_loss, whole = gradients_of(samples, 1, torch.float64)
    assert loss == pytest.approx(whole_loss, abs=TOLERANCE)
    for part, wanted in zip(found, whole, strict=True):
        torch.testing.assert_close(part, wanted, rtol=0, atol=TOLERANCE)


def test_microbatches_of_lanes_give_the_gradient_of_the_batch() -> None:
    """The same under --exact, where every lane is split separately."""
    _, found = gradients_of(20, 4, torch.float32, "--exact", "--lanes=2")
    _, whole = gradients_of(20, 1, torch.float64)
    for part, wanted in zip(found, whole, strict=True):
        torch.testing.assert_close(part, wanted, rtol=0, atol=TOLERANCE)


def test_microbatches_have_equal_sizes() -> None:
    """The supervisor requests only divisors, and no more microbatches than needed."""
    assert [fewest_microbatches(10, largest) for largest in (10, 9, 5, 4, 2, 1)] == [1, 2, 2, 5, 5, 10]
    assert [fewest_microbatches(7, largest) for largest in (7, 6, 3, 1)] == [1, 7, 7, 7]
    for samples in range(1, 65):
        for largest in range(1, samples + 1):
            parts = fewest_microbatches(samples, largest)
            assert samples % parts == 0
            assert samples // parts <= largest


def test_a_share_or_a_lane_is_split() -> None:
    """Under --exact a lane is split into microbatches, otherwise a rank's share. Both depend on the world size."""
    config = quick_config("--global-batch-size=24")
    assert [samples_to_cut(config, ranks) for ranks in (1, 2, 3)] == [24, 12, 8]
    assert samples_to_cut(quick_config("--global-batch-size=24", "--lanes=8"), 2) == 12
    exact = quick_config("--global-batch-size=64", "--exact", "--lanes=8")
    assert [samples_to_cut(exact, ranks) for ranks in (1, 2, 4)] == [8, 8, 8]
    assert samples_to_cut(quick_config("--global-batch-size=64", "--exact"), 4) == 16


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, ("--global-batch-size=20", "--accumulate=4")),
        (3, ("--global-batch-size=20",)),
        (2, ("--global-batch-size=64", "--exact", "--lanes=8", "--accumulate=3")),
        (3, ("--global-batch-size=24", "--lanes=8")),
    ],
)
def test_a_plan_with_unequal_microbatches_is_refused(world_size: int, flags: tuple[str, ...]) -> None:
    """Ranks of every launcher run this check, also those without a command line check."""
    info = DatasetInfo("made", 640, 100, ("a", "b"), (3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(UserError) as caught:
        make_plan(quick_config(*flags), info, world_size)
    assert "equal parts" in caught.value.what
    assert make_plan(_without(quick_config(*flags)), info, 2).microbatch_size > 0


def _without(config: Config) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=1))
