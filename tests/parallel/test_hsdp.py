"""hsdp: shards within a node, copies across nodes. Four gloo ranks stand for two nodes with two ranks each."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ranks import run_ranks
from harness.runs import quick_config, read_results, step_losses, train_in
from paceline.checkpoints.store import inspect_checkpoint
from paceline.errors import UserError
from paceline.metrics.recorder import read_rows
from paceline.models.cnn import CNN
from paceline.parallel.apply import num_shards, parallelise
from paceline.parallel.parts import local_part
from paceline.runs.folder import RunFolder
from paceline.runtime.detect import World

TOLERANCE = 1e-5  # sums in another order differ in their last bits
# Clipping by the norm uses a sum over shards. A copy that counts twice would change it.
FLAGS = ("--ema-decay", "0.9", "--max-steps", "12", "--clip-norm", "0.1")


def two_nodes(world: World, ranks_per_node: int = 2) -> World:
    """Ranks on one machine stand for two nodes."""
    node, local = divmod(world.rank, ranks_per_node)
    return dataclasses.replace(world, local_rank=local, local_world_size=ranks_per_node, host=f"node{node}")


def train_on_two_nodes(world: World, folder: str, flags: tuple[str, ...], resume: bool = False) -> dict[str, Any]:
    return train_in(two_nodes(world), folder, flags, resume)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("strategies")
    for strategy in ("ddp", "fsdp", "hsdp"):
        run_ranks(4, train_on_two_nodes, str(folder / strategy), ("--strategy", strategy, *FLAGS))
    return {strategy: folder / strategy for strategy in ("ddp", "fsdp", "hsdp")}


def norms(folder: Path) -> list[float]:
    return [row["grad_norm"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]


@pytest.mark.long
def test_losses_and_norms_equal_those_of_ddp_and_fsdp(runs: dict[str, Path]) -> None:
    for other in ("ddp", "fsdp"):
        assert step_losses(runs["hsdp"]) == pytest.approx(step_losses(runs[other]), abs=TOLERANCE)
        assert norms(runs["hsdp"]) == pytest.approx(norms(runs[other]), rel=1e-4)
    assert read_results(runs["hsdp"])["test_accuracy"] == read_results(runs["ddp"])["test_accuracy"]


@pytest.mark.long
def test_a_checkpoint_holds_each_shard_once(runs: dict[str, Path]) -> None:
    files = {}
    for strategy in ("fsdp", "hsdp"):
        latest = (RunFolder(runs[strategy]).checkpoints / "latest").resolve()
        files[strategy] = sorted(name for name in inspect_checkpoint(latest).manifest.files if "model" in name)
    assert len(files["fsdp"]) == 4
    assert len(files["hsdp"]) == 2  # the ranks of the first node write


@pytest.mark.long
def test_other_strategies_and_world_sizes_continue_it(tmp_path: Path, runs: dict[str, Path]) -> None:
    stopped = tmp_path / "stopped"
    run_ranks(4, train_on_two_nodes, str(stopped), ("--strategy", "hsdp", *FLAGS, "--max-steps", "5"))
    for world_size, strategy in ((1, "single"), (2, "fsdp"), (4, "ddp")):
        folder = tmp_path / strategy
        shutil.copytree(stopped, folder, symlinks=True)
        run_ranks(world_size, train_in, str(folder), ("--strategy", strategy, *FLAGS), True)
        assert step_losses(folder) == pytest.approx(step_losses(runs["hsdp"]), abs=TOLERANCE)
    # Resumed as it was, it has the bits of the uninterrupted run.
    run_ranks(4, train_on_two_nodes, str(stopped), ("--strategy", "hsdp", *FLAGS), True)
    assert read_results(stopped)["weights_sha256"] == read_results(runs["hsdp"])["weights_sha256"]


@pytest.mark.long
def test_hsdp_continues_ddp(tmp_path: Path, runs: dict[str, Path]) -> None:
    run_ranks(2, train_in, str(tmp_path), ("--strategy", "ddp", *FLAGS, "--max-steps", "5"))
    run_ranks(4, train_on_two_nodes, str(tmp_path), ("--strategy", "hsdp", *FLAGS), True)
    assert step_losses(tmp_path) == pytest.approx(step_losses(runs["hsdp"]), abs=TOLERANCE)


def held_by(world: World) -> tuple[int, int, float]:
    here = two_nodes(world)
    model = parallelise(CNN((3, 32, 32), 10), quick_config("--strategy", "hsdp"), here)
    held = sum(local_part(parameter).numel() for parameter in model.module.parameters())
    return held, model.copies, num_shards("hsdp", here)


def test_a_rank_holds_a_half_and_not_a_quarter() -> None:
    whole = sum(parameter.numel() for parameter in CNN((3, 32, 32), 10).parameters())
    answers = run_ranks(4, held_by)
    assert {(copies, shards) for _, copies, shards in answers} == {(2, 2)}
    assert sum(held for held, _, _ in answers) == 2 * whole


def refuse_unequal_nodes(world: World) -> str:
    local = (0, 1) if world.rank == 0 else (world.rank - 1, 2)
    here = dataclasses.replace(world, local_rank=local[0], local_world_size=local[1])
    try:
        parallelise(torch.nn.Linear(4, 4), quick_config("--strategy", "hsdp"), here)
    except UserError as error:
        return error.what
    return ""


def test_unequal_nodes_are_refused_on_every_rank() -> None:
    assert all("equally many ranks on each node" in text for text in run_ranks(3, refuse_unequal_nodes))
