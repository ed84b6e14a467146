"""The same global batch gives the same run on any number of ranks and under any strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in

# Float sums in another order differ in their last bits. Over 18 steps the difference stays below this.
TOLERANCE = 1e-5


def losses_of(folder: Path, world_size: int, *flags: str) -> list[float]:
    run_ranks(world_size, train_in, str(folder), flags)
    return step_losses(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    losses = losses_of(folder, 1, "--strategy", "single")
    assert len(losses) == 18
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, ("--strategy", "ddp")),
        (4, ("--strategy", "ddp")),
        (1, ("--strategy", "fsdp")),
        (2, ("--strategy", "fsdp")),
        (4, ("--strategy", "fsdp")),
        (2, ("--strategy", "ddp", "--accumulate", "4")),
        (2, ("--strategy", "fsdp", "--accumulate", "2")),
    ],
)
def test_losses_equal_those_of_one_rank(
    tmp_path: Path, alone: list[float], world_size: int, flags: tuple[str, ...]
) -> None:
    assert losses_of(tmp_path, world_size, *flags) == pytest.approx(alone, abs=TOLERANCE)


def test_every_rank_ends_with_the_same_weights(tmp_path: Path) -> None:
    results = run_ranks(2, train_in, str(tmp_path), ("--strategy", "ddp"))
    hashes = {result["weights_sha256"] for result in results}
    assert hashes == {read_results(tmp_path)["weights_sha256"]}


def test_the_same_run_twice_gives_the_same_bits(tmp_path: Path) -> None:
    first, second = (
        run_ranks(2, train_in, str(tmp_path / name), ("--strategy", "ddp"))[0] for name in ("first", "second")
    )
    assert first["weights_sha256"] == second["weights_sha256"]
    assert step_losses(tmp_path / "first") == step_losses(tmp_path / "second")


def test_another_seed_gives_other_losses(tmp_path: Path, alone: list[float]) -> None:
    assert losses_of(tmp_path, 1, "--strategy", "single", "--seed", "7") != alone


def test_synchronised_batchnorm_makes_ranks_equal_to_one(tmp_path: Path) -> None:
    # A small learning rate: rounding differences grow with every step, and faster with larger steps.
    flags = ("--model-name", "harness.batchnorm_model:build", "--max-steps", "6", "--base-lr", "0.05")
    lone = losses_of(tmp_path / "one", 1, *flags)
    without = losses_of(tmp_path / "without", 2, *flags)
    synchronised = losses_of(tmp_path / "with", 2, *flags, "--sync-bn")
    assert synchronised == pytest.approx(lone, abs=TOLERANCE)
    assert without != pytest.approx(lone, abs=TOLERANCE)  # otherwise the test above would prove nothing


def test_clipping_and_moving_average_agree_between_ddp_and_fsdp(tmp_path: Path) -> None:
    flags = ("--clip-norm", "0.1", "--ema-decay", "0.9")
    replicated = losses_of(tmp_path / "ddp", 2, "--strategy", "ddp", *flags)
    sharded = losses_of(tmp_path / "fsdp", 2, "--strategy", "fsdp", *flags)
    assert sharded == pytest.approx(replicated, abs=TOLERANCE)
    accuracies = [read_results(tmp_path / name)["test_accuracy"] for name in ("ddp", "fsdp")]
    assert accuracies[0] == accuracies[1]


DROPOUT = ("--dropout", "0.3", "--base-lr", "0.05", "--max-steps", "6")


@pytest.fixture(scope="module")
def alone_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of one rank, for each of our small models with dropout."""
    folder = tmp_path_factory.mktemp("alone-with-dropout")
    return {model: losses_of(folder / model, 1, "--model-name", model, *DROPOUT) for model in ("mlp", "cnn")}


@pytest.mark.parametrize(
    ("model", "world_size", "flags"),
    [
        ("mlp", 1, ("--accumulate", "4")),
        ("mlp", 2, ("--strategy", "fsdp", "--accumulate", "2")),
        ("mlp", 4, ("--strategy", "ddp")),
        ("cnn", 1, ("--exact", "--lanes", "4")),
        ("cnn", 2, ("--strategy", "ddp", "--accumulate", "2")),
        ("cnn", 2, ("--exact", "--lanes", "8", "--accumulate", "2")),
        ("cnn", 4, ("--strategy", "fsdp")),
    ],
)
def test_dropout_is_the_same_on_any_number_of_ranks(
    tmp_path: Path, alone_with_dropout: dict[str, list[float]], model: str, world_size: int, flags: tuple[str, ...]
) -> None:
    """A sample's dropout does not depend on its rank, microbatch, lane or strategy."""
    losses = losses_of(tmp_path, world_size, "--model-name", model, *DROPOUT, *flags)
    assert losses == pytest.approx(alone_with_dropout[model], abs=TOLERANCE)


def test_dropout_changes_the_losses(tmp_path: Path, alone_with_dropout: dict[str, list[float]]) -> None:
    """Otherwise the test above would prove nothing."""
    assert losses_of(tmp_path, 1, *DROPOUT, "--dropout", "0") != pytest.approx(alone_with_dropout["cnn"], abs=1e-3)


def test_dropout_is_the_same_after_a_resume_on_other_ranks(
    tmp_path: Path, alone_with_dropout: dict[str, list[float]]
) -> None:
    """Resumed inside an epoch on another number of ranks, the run has the dropout of the undisturbed run."""
    for number, (size, stop) in enumerate([(2, 2), (4, 5), (1, 6)]):
        run_ranks(size, train_in, str(tmp_path), (*DROPOUT, "--max-steps", str(stop)), number > 0)
    assert step_losses(tmp_path) == pytest.approx(alone_with_dropout["cnn"], abs=TOLERANCE)
