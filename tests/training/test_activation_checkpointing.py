"""Activation checkpointing: the same bits with fewer saved activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in
from paceline.errors import UserError
from paceline.models.recompute import recompute_blocks
from paceline.models.vit import ViT

VIT = ("--model-name", "vit-ti16", "--model-args", "patch_size=8", "width=16", "depth=2", "heads=2", "drop_path=0.3")
MODELS = {
    "vit": (*VIT, "--dropout", "0.1"),
    "batchnorm": ("--model-name", "harness.batchnorm_model:build"),
    "torch-dropout": ("--model-name", "harness.dropout_model:build_blocks"),
}
SHORT = ("--epochs", "1", "--accumulate", "2")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "more"), [(1, ()), (2, ()), (2, ("--exact", "--lanes", "4"))])
def test_the_bits_are_the_same(tmp_path: Path, model: str, ranks: int, more: tuple[str, ...]) -> None:
    flags = (*MODELS[model], *SHORT, *more)
    run_ranks(ranks, train_in, str(tmp_path / "plain"), flags)
    run_ranks(ranks, train_in, str(tmp_path / "again"), (*flags, "--activation-checkpointing"))
    assert step_losses(tmp_path / "plain") == step_losses(tmp_path / "again")
    plain, again = (read_results(tmp_path / name)["weights_sha256"] for name in ("plain", "again"))
    assert plain == again


@pytest.mark.parametrize("model", ["vit", "batchnorm"])
def test_fsdp_trains_the_same(tmp_path: Path, model: str) -> None:
    flags = (*MODELS[model], *SHORT, "--strategy", "fsdp")
    run_ranks(2, train_in, str(tmp_path / "plain"), flags)
    run_ranks(2, train_in, str(tmp_path / "again"), (*flags, "--activation-checkpointing"))
    assert step_losses(tmp_path / "plain") == step_losses(tmp_path / "again")


def kept_for_backward(model: nn.Module) -> int:
    """Elements that autograd saves outside of the recomputed blocks."""
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, 3, 32, 32))
    return sum(kept)


def test_fewer_activations_are_saved() -> None:
    model = ViT("vit-ti16", (3, 32, 32), 3, patch_size=8, width=16, depth=8, heads=2)
    before = kept_for_backward(model)
    recompute_blocks(model, draws_from_torch=False)
    assert kept_for_backward(model) < before / 5


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        recompute_blocks(nn.Linear(2, 2), draws_from_torch=False)
    assert refused.value.where == "--activation-checkpointing"
