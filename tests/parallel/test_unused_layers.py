"""Layers that some steps do not use: all ranks skip their update in the same steps as one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.branching_model import Branching
from harness.ranks import run_ranks
from harness.runs import quick_config, read_results, step_losses, train_in
from paceline.checkpoints.capture import gather_whole, model_tensors
from paceline.data.loader import Batch
from paceline.parallel.apply import parallelise, settle_buckets
from paceline.runtime.detect import World
from paceline.runtime.node_memory import SWITCH
from paceline.training.guards import Guards
from paceline.training.optim import build_optimizer
from paceline.training.recorded_step import build_step

STEPS, BATCH, INPUTS, CLASSES = 8, 16, 6, 4
# Float sums in another order differ in their last bits. Over the steps of these tests it stays below this.
TOLERANCE = 1e-5


def new_model() -> Branching:
    torch.manual_seed(3)
    return Branching(CLASSES, INPUTS, threshold=100.0)


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Samples that use the rare layer: on one rank, on another, on all, or on none."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    rare = {0: [1], 1: [], 2: [BATCH - 1], 3: [], 4: [], 5: range(0, BATCH, 2), 6: [BATCH // 2], 7: []}[step]
    inputs[list(rare), 0] = 100.0
    return inputs, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def plain_loop(optimizer_name: str, accumulate: int) -> tuple[dict[str, Tensor], set[str], list[float]]:
    """The result of one process with plain torch, with the parameters in its optimizer state, and the norms."""
    config = quick_config(*flags_of(optimizer_name, accumulate))
    model = new_model()
    optimizer = build_optimizer(config.optim, model)
    norms = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = global_batch(step)
        if accumulate == 1:
            nn.functional.cross_entropy(model(inputs), labels).backward()
        else:  # the first and the second half of both ranks' shares
            quarters = zip(inputs.chunk(4), labels.chunk(4), strict=True)
            parts = list(quarters)
            for first, second in ((0, 2), (1, 3)):
                both = [torch.cat([parts[first][half], parts[second][half]]) for half in (0, 1)]
                (nn.functional.cross_entropy(model(both[0]), both[1]) / 2).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
    known = {name for name, parameter in model.named_parameters() if optimizer.state.get(parameter)}
    return dict(model.state_dict()), known, norms


def flags_of(optimizer_name: str, accumulate: int) -> tuple[str, ...]:
    return (
        *(f"--optimizer={optimizer_name}", "--weight-decay=0.1", "--clip-norm=0.5", f"--accumulate={accumulate}"),
        f"--global-batch-size={BATCH}",
    )


def steps_on_rank(world: World, flags: tuple[str, ...], uses_sockets: bool) -> dict[str, Any]:
    """The same batches, split into the ranks' shares."""
    if uses_sockets:
        os.environ[SWITCH] = "off"
    config = quick_config(*flags)
    model = parallelise(new_model(), config, world)
    settle_buckets(model, torch.zeros(2, INPUTS))
    optimizer = build_optimizer(config.optim, model.module)
    step = build_step(model, optimizer, None, config, world, Guards())
    norms = []
    for number in range(STEPS):
        inputs, labels = (part.chunk(world.world_size)[world.rank] for part in global_batch(number))
        report = step.gradients(Batch(inputs, labels, labels, 0.0), number, wants_stop=False)
        assert report.is_stop_wanted is False
        norms.append(report.grad_norm)
        step.update(number, 0.1, report)
    known = {name for name, parameter in model.module.named_parameters() if optimizer.state.get(parameter)}
    # As arrays: the memory of a tensor ends with its rank.
    weights = {name: value.numpy() for name, value in gather_whole(model_tensors(model.module), world.device).items()}
    return {"weights": weights, "known": known, "norms": norms, "exchange": step.exchange}


def require_like_plain(answers: list[dict[str, Any]], optimizer_name: str = "sgd", accumulate: int = 1) -> None:
    weights, known, norms = plain_loop(optimizer_name, accumulate)
    for answer in answers:
        assert answer["known"] == known
        assert answer["norms"] == pytest.approx(norms, abs=TOLERANCE)
        for name, value in weights.items():
            np.testing.assert_allclose(answer["weights"][name], value.numpy(), rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    ("ranks", "strategy", "sockets"),
    [
        *((2, "ddp", False), (2, "ddp", True), (2, "fsdp", False)),
        (4, "ddp", False),
        pytest.param(4, "ddp", True, marks=pytest.mark.slow),
        pytest.param(4, "fsdp", False, marks=pytest.mark.slow),
    ],
)
def test_a_layer_without_samples_is_not_updated(ranks: int, strategy: str, sockets: bool) -> None:
    """Momentum and weight decay are not applied, as on one process, and the weights are the same."""
    flags = (*flags_of("sgd", 1), f"--strategy={strategy}")
    answers = run_ranks(ranks, steps_on_rank, flags, sockets)
    if strategy == "ddp":
        assert answers[0]["exchange"] == ("gloo" if sockets else "shared memory")
    require_like_plain(answers)


@pytest.mark.parametrize(("strategy", "sockets"), [("ddp", False), ("ddp", True), ("fsdp", False)])
def test_a_layer_used_by_one_microbatch_has_a_gradient(strategy: str, sockets: bool) -> None:
    """Also if the last microbatch, which reduces the gradients over ranks, did not use it."""
    answers = run_ranks(2, steps_on_rank, (*flags_of("sgd", 2), f"--strategy={strategy}"), sockets)
    require_like_plain(answers, accumulate=2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_other_optimizers_do_not_update_unused_layers(optimizer: str) -> None:
    """Adam's step count of a layer is the number of steps that used it, on any number of ranks."""
    require_like_plain(run_ranks(2, steps_on_rank, (*flags_of(optimizer, 1), "--strategy=ddp"), False), optimizer)


def test_sharded_microbatches_in_mixed_precision_run_with_unused_layers() -> None:
    """Earlier microbatches accumulate in another type. A layer that only the last one used is still reduced."""
    flags = (*flags_of("sgd", 2), "--strategy=fsdp", "--amp-dtype=bf16")
    answers = run_ranks(2, steps_on_rank, flags, False)
    _, known, _ = plain_loop("sgd", 2)
    assert all(answer["known"] == known for answer in answers)


@pytest.mark.parametrize("sockets", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exact_runs_do_not_update_unused_layers_on_any_number_of_ranks(sockets: bool) -> None:
    """The same bits on 1, 2 and 4 ranks, and the weights of the plain loop."""
    flags = (*flags_of("sgd", 1), "--exact", "--lanes=4")
    answers = [run_ranks(ranks, steps_on_rank, flags, sockets)[0] for ranks in (1, 2, 4)]
    require_like_plain(answers)
    for answer in answers[1:]:
        for name, value in answer["weights"].items():
            np.testing.assert_array_equal(value, answers[0]["weights"][name], err_msg=name)


def test_complete_exact_runs_with_unused_layers_end_with_the_same_bits(tmp_path: Path) -> None:
    """With training, validation and saves: 1, 2 and 4 ranks give the same hashes."""
    flags = ("--exact", "--lanes=4", "--model-name", "harness.branching_model:build", "--max-steps=9")
    for ranks in (1, 2, 4):
        run_ranks(ranks, train_in, str(tmp_path / str(ranks)), flags)
    results = [read_results(tmp_path / str(ranks)) for ranks in (1, 2, 4)]
    assert len({(result["weights_sha256"], result["optimizer_sha256"]) for result in results}) == 1


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_complete_runs_with_unused_layers_equal_the_run_on_one_rank(tmp_path: Path, strategy: str) -> None:
    """Also after a resume in the middle: parameters without optimizer state stay without it."""
    flags = ("--model-name", "harness.branching_model:build", "--weight-decay=0.05", "--base-lr=0.02")
    run_ranks(1, train_in, str(tmp_path / "one"), flags)
    run_ranks(2, train_in, str(tmp_path / "two"), (*flags, f"--strategy={strategy}", "--max-steps=9"))
    run_ranks(2, train_in, str(tmp_path / "two"), (*flags, f"--strategy={strategy}"), True)
    assert step_losses(tmp_path / "two") == pytest.approx(step_losses(tmp_path / "one"), abs=TOLERANCE)
