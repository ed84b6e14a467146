"""The complete state of a model is restored bit for bit, on any number of ranks and for every type of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.masked_model import LOWEST, MaskedModel
from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in
from harness.runs import train_in as train_on_one_node
from paceline.checkpoints.format import step_folders
from paceline.checkpoints.payload import PayloadReader
from paceline.checkpoints.resume import restore_weights
from paceline.checkpoints.store import open_checkpoint
from paceline.parallel import apply
from paceline.parallel.buffers import average_statistics, gather_own_buffers, running_statistics, set_own_buffers
from paceline.parallel.parts import bits
from paceline.runtime.detect import World

FLAGS = ("--model-name=harness.masked_model:build", "--save-steps=4", "--keep-last=9", "--no-async-save")
BUILT = ("all_", "scalar_", "empty_", "mask", "same_mask", "strided")


def raw(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    return tensor.dtype, tuple(tensor.shape), bits(tensor).contiguous().view(-1).view(torch.uint8).tolist()


def contents(checkpoint: Path) -> dict[str, object]:
    """Every tensor of a checkpoint, as bits."""
    opened = open_checkpoint(checkpoint)
    readers = {kind: PayloadReader(opened.path, opened.files_of(kind)) for kind in ("model", "optimizer", "statistics")}
    return {f"{kind}/{name}": raw(reader.read(name)) for kind, reader in readers.items() for name in reader.shapes}


def train_with_real_ddp(world: World, folder: str, flags: tuple[str, ...], resume: bool = False) -> dict[str, Any]:
    """As on several nodes: torch's DDP reduces the gradients, not shared memory."""
    apply.share_gradients = lambda *_: None  # type: ignore[assignment]
    return train_in(world, folder, flags, resume)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "single"),
        (2, "ddp"),
        pytest.param(2, "fsdp", marks=pytest.mark.long),
        pytest.param(2, "ddp on two nodes", marks=pytest.mark.long),
    ],
)
def test_a_run_with_masks_and_all_types_resumes_bit_for_bit(tmp_path: Path, ranks: int, strategy: str) -> None:
    """A stopped and resumed run ends with the same bits. Masks, tables and counters are unchanged."""
    train_in = train_with_real_ddp if "nodes" in strategy else train_on_one_node
    flags = (*FLAGS, f"--strategy={strategy.split()[0]}")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_ranks(ranks, train_in, str(whole), flags)
    run_ranks(ranks, train_in, str(halves), (*flags, "--max-steps=13"))
    run_ranks(ranks, train_in, str(halves), flags, True)
    names = [path.name for path in step_folders(whole / "checkpoints")]
    assert names == [path.name for path in step_folders(halves / "checkpoints") if path.name != "step-00000013"]
    for name in names:
        assert contents(whole / "checkpoints" / name) == contents(halves / "checkpoints" / name), name
    assert step_losses(whole) == step_losses(halves)
    assert read_results(whole)["weights_sha256"] == read_results(halves)["weights_sha256"]

    saved = contents(whole / "checkpoints" / "latest")
    fresh = MaskedModel(3, 10)
    for name, value in fresh.state_dict().items():
        if name.startswith(BUILT):
            assert saved[f"model/{name}"] == raw(value), name
    assert "model/transient_mask" not in saved
    assert LOWEST in fresh.mask
    own = {name.removeprefix("statistics/") for name in saved if name.startswith("statistics/")}
    statistics = {f"{layer}.running_{kind}" for layer in ("norm", "instance") for kind in ("mean", "var")}
    assert own == (statistics | {"seen"} if ranks > 1 else set())


def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_back(tmp_path: Path) -> None:
    """A strategy's buffers do not prevent loading with another strategy."""
    flags = (*FLAGS, "--strategy=fsdp")
    run_ranks(2, train_in, str(tmp_path), (*flags, "--max-steps=4"))
    model = MaskedModel(3, 10)
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "latest")
    restore_weights(checkpoint, model)
    saved = PayloadReader(checkpoint.path, checkpoint.files_of("model"))
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            assert raw(value) == raw(saved.read(name)), name
    assert model.calls > 0
    rows = PayloadReader(checkpoint.path, checkpoint.files_of("statistics")).read("seen")
    assert rows[0] != rows[1]
    assert model.seen == rows[0]  # for buffers that are not statistics, the primary's values
    run_ranks(1, train_in, str(tmp_path), (*FLAGS, "--strategy=single", "--max-steps=9"), True)
    run_ranks(2, train_in, str(tmp_path), (*FLAGS, "--strategy=ddp"), True)
    assert read_results(tmp_path)["steps"] == 18


class Mixed(nn.Module):
    """Statistics and other float buffers, with values that a wrong mean would change."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2).double()
        self.small = nn.BatchNorm1d(2).to(torch.float16)
        self.untracked = nn.BatchNorm1d(2, track_running_stats=False)
        assert self.norm.running_mean is not None
        assert self.small.running_var is not None
        self.norm.running_mean.fill_(1.0 + rank * 2.0**-50)
        self.small.running_var.fill_(60000.0)
        self.register_buffer("lowest", torch.full((2,), LOWEST))
        self.register_buffer("own", torch.tensor([float(rank), float("nan")]))
        self.register_buffer("own_count", torch.tensor(rank, dtype=torch.uint16))
        self.register_buffer("transient", torch.full((2,), float(rank)), persistent=False)


def average_mixed(world: World) -> dict[str, Any]:
    model = Mixed(world.rank)
    rows = gather_own_buffers(model, world)
    average_statistics(model, world)
    averaged = {name: raw(value) for name, value in model.named_buffers()}
    set_own_buffers(model, rows, world)
    again = {name: raw(value) for name, value in model.named_buffers()}
    return {"statistics": sorted(running_statistics(model)), "rows": sorted(rows), "averaged": averaged, "again": again}


def test_only_running_statistics_are_averaged() -> None:
    """The mean of large values does not overflow, float64 stays float64, and no other buffer changes."""
    statistics = [f"{layer}.running_{kind}" for layer in ("norm", "small") for kind in ("mean", "var")]
    for rank, answer in enumerate(run_ranks(2, average_mixed)):
        own = {name: raw(value) for name, value in Mixed(rank).named_buffers()}
        assert answer["statistics"] == statistics
        assert answer["rows"] == sorted([*statistics, "own", "own_count"])
        assert answer["again"] == own
        assert answer["averaged"]["norm.running_mean"] == raw(torch.full((2,), 1.0 + 2.0**-51, dtype=torch.float64))
        assert answer["averaged"]["small.running_var"] == raw(torch.full((2,), 60000.0, dtype=torch.float16))
        changed = {name for name in own if answer["averaged"][name] != own[name]}
        assert changed == {"norm.running_mean"}
