"""The options of FSDP and DDP: other groups and other traffic, the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.ranks import run_ranks
from harness.runs import quick_config, step_losses, train_in
from paceline.errors import UserError
from paceline.models.cnn import CNN
from paceline.parallel.apply import parallelise
from paceline.runtime.detect import World
from paceline.settings.load import LoadedConfig, load_config
from paceline.settings.rules import check_config, check_world


def results_of(folder: Path, *flags: str) -> dict[str, Any]:
    results: dict[str, Any] = run_ranks(2, train_in, str(folder), flags)[0]
    return results


def bytes_per_step(results: dict[str, Any]) -> int:
    return max(int(rank["communicated_bytes_per_step"]) for rank in results["process_metrics"])


@pytest.mark.long
def test_the_options_of_fsdp_change_the_traffic_and_not_the_weights(tmp_path: Path) -> None:
    """Weights that stay gathered are sent once per step, not twice. The size of a gather changes no bit."""
    fsdp = ("--strategy", "fsdp")
    found = {
        "blocks": results_of(tmp_path / "blocks", *fsdp),
        "layers": results_of(tmp_path / "layers", *fsdp, "--fsdp-wrap", "layers"),
        "model": results_of(tmp_path / "model", *fsdp, "--fsdp-wrap", "model"),
        "kept": results_of(tmp_path / "kept", *fsdp, "--fsdp-wrap", "layers", "--no-reshard-after-forward"),
    }
    assert len({results["weights_sha256"] for results in found.values()}) == 1
    assert bytes_per_step(found["kept"]) < bytes_per_step(found["layers"])


@pytest.mark.long
def test_validation_of_the_moving_average_does_not_change_training(tmp_path: Path) -> None:
    """Validation gathers the averaged weights. The next step gathers the trained ones, with or without a save."""
    average = ("--strategy", "fsdp", "--ema-decay", "0.5", "--epochs", "3")
    choices = {"every epoch": ("--save-epochs", "1"), "never": ("--save-epochs", "100")}
    found = {
        (saves, wrap): results_of(tmp_path / f"{saves}-{wrap}", *average, *flags, "--fsdp-wrap", wrap)["weights_sha256"]
        for saves, flags in choices.items()
        for wrap in ("blocks", "model")
    }
    assert len(set(found.values())) == 1, found


class Attention(nn.Module):
    """Has its own parameter and children. One child is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.attention(inputs, inputs, inputs)[0]
        return outputs * self.scale


def train_attention(world: World) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    config = quick_config("--strategy", "fsdp", "--fsdp-wrap", "layers")
    model = parallelise(nn.Sequential(Attention(), nn.Linear(4, 2)), config, world).module
    model(torch.ones(2, 3, 4)).sum().backward()
    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def test_a_layer_with_parameters_and_children_is_one_group() -> None:
    """Attention and layer scale use their children's weights without calling the children."""
    assert run_ranks(2, train_attention) == [["", "0", "1"]] * 2


def groups_of(world: World, wrap: str) -> list[str]:
    """The layers that are FSDP groups."""
    from torch.distributed.fsdp import FSDPModule

    config = quick_config("--strategy", "fsdp", "--fsdp-wrap", wrap)
    model = parallelise(small_model(), config, world).module
    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def small_model() -> nn.Module:
    body = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    return nn.Sequential(body, nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("wrap", "groups"), [("model", [""]), ("blocks", ["", "0.0.0", "0.1"]), ("layers", ["", "0.0.0", "0.1", "1"])]
)
def test_the_wrapping_policy_sets_the_groups(wrap: str, groups: list[str]) -> None:
    """A group per layer or per block, and one for the rest."""
    assert run_ranks(2, groups_of, wrap) == [groups, groups]


def buckets_of(world: World, cap_mb: int) -> tuple[bool, int]:
    """Whether memory is shared, and the bucket size in bytes."""
    config = quick_config("--strategy", "ddp", *(("--bucket-cap-mb", str(cap_mb)) if cap_mb else ()))
    model = parallelise(CNN((3, 32, 32), 10), config, world)
    return model.shared is not None, getattr(model.forward, "bucket_bytes_cap", 0)


def test_the_size_of_buckets_reaches_ddp() -> None:
    """A given bucket size also disables shared memory, which has no buckets."""
    assert run_ranks(2, buckets_of, 0) == [(True, 0)] * 2
    assert run_ranks(2, buckets_of, 3) == [(False, 3 * 2**20)] * 2


def test_other_bucket_sizes_train_the_same_weights(tmp_path: Path) -> None:
    """With two ranks, sums do not depend on the buckets."""
    found = [results_of(tmp_path / str(cap), "--bucket-cap-mb", str(cap)) for cap in (1, 25)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_short_exchange_halves_the_bytes_of_gradients(tmp_path: Path, strategy: str) -> None:
    flags = ("--strategy", strategy, "--max-steps", "6")
    plain = results_of(tmp_path / "plain", *flags)
    short = results_of(tmp_path / "short", *flags, "--exchange-dtype", "bf16")
    saved = bytes_per_step(plain) - bytes_per_step(short)
    gradients = 4 * sum(parameter.numel() for parameter in CNN((3, 32, 32), 10).parameters())
    # Two ranks send each gradient once under ddp (twice a half), and half of it under fsdp, which also sends weights.
    assert saved == pytest.approx(gradients / 2 if strategy == "ddp" else gradients / 4, rel=0.01)
    # bf16 has three digits.
    assert step_losses(tmp_path / "short") == pytest.approx(step_losses(tmp_path / "plain"), abs=0.02)
    assert step_losses(tmp_path / "short") != step_losses(tmp_path / "plain")


def check_all(loaded: LoadedConfig, world_size: int) -> None:
    check_config(loaded)
    check_world(loaded, world_size)


def test_an_exchange_type_without_effect_is_refused() -> None:
    for flags, world_size in ((["--exact"], 2), ([], 1), (["--strategy", "single"], 1)):
        loaded = load_config("shapes-cnn", ["--exchange-dtype", "bf16", *flags])
        with pytest.raises(UserError):
            check_all(loaded, world_size)
