"""A user's loss and metrics are checked before the first step. The check changes no bit of the run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from harness.ranks import run_ranks
from harness.runs import quick_config, read_results, train_in
from paceline.errors import UserError
from paceline.runtime.detect import World
from paceline.training.components import build_components

CODE = """\
import random

import numpy as np
import torch
from torch.nn import functional as F

calls = 0
weights = torch.tensor([1.0, 2.0] * 50)
drawn = torch.rand(())


def mean(outputs, labels):
    return F.cross_entropy(outputs, labels)

def per_sample(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")

def per_sample_weighted(outputs, labels):
    return weights[labels] * F.cross_entropy(outputs, labels, reduction="none")

def nll_of_probabilities(outputs, labels):
    assert outputs.min() >= 0 and outputs.max() <= 1
    return F.nll_loss(outputs.log(), labels)

def nll_of_log_probabilities(outputs, labels):
    assert outputs.max() <= 0
    return F.nll_loss(outputs, labels)

def square_root(outputs, labels):
    return outputs.sqrt().mean()  # not a number where an output is negative

def changes_its_inputs(outputs, labels):
    outputs.mul_(2)
    labels.add_(0)
    return F.cross_entropy(outputs, labels)

def weighted(outputs, labels):
    return F.cross_entropy(outputs, labels, weight=weights[:outputs.shape[1]])

def drawn_by_python(outputs, labels):
    return F.cross_entropy(outputs, labels) * random.random()

def drawn_by_numpy(outputs, labels):
    return F.cross_entropy(outputs, labels) * float(np.random.rand())

def total(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="sum")

def contrast(outputs, labels):
    return F.cross_entropy(outputs, labels) + 0.01 * (outputs @ outputs.T).var()

def normalised_per_sample(outputs, labels):
    return per_sample((outputs - outputs.mean(0)) / outputs.std(0), labels)

def only_64(outputs, labels):
    assert len(labels) == 64 or not torch.is_grad_enabled()
    return F.cross_entropy(outputs, labels)

def number(outputs, labels):
    return 1.0

def whole_numbers(outputs, labels):
    return labels

def per_class(outputs, labels):
    return outputs

def elsewhere(outputs, labels):
    return per_sample(outputs, labels).to("meta")

def sparse(outputs, labels):
    return per_sample(outputs, labels).to_sparse()

def no_second_argument(outputs):
    return outputs

def only_with_gradients(outputs, labels):
    value = per_sample(outputs, labels)
    return value + torch.autograd.grad(value.sum(), outputs)[0].sum(1)

def right(outputs, labels):
    return outputs.argmax(1) == labels

def rank_in_batch(outputs, labels):
    return outputs[:, 0].argsort().argsort().float()

def counts_and_draws(outputs, labels):
    global calls
    calls += 1
    noise = 1 + 0.01 * torch.rand(()) + 0.1 * drawn
    return F.cross_entropy(outputs, labels) * noise / calls
"""
MEANS = ["mean", "per_sample", "per_sample_weighted", "nll_of_probabilities", "nll_of_log_probabilities"]
MEANS += ["square_root", "changes_its_inputs"]
NOT_MEANS = ["weighted", "total", "contrast", "normalised_per_sample", "only_64"]
WRONG_LOSSES = ["number", "whole_numbers", "per_class", "elsewhere", "only_with_gradients", "sparse"]
WRONG_METRICS = ["number", "mean", "per_class", "elsewhere", "no_second_argument", "sparse"]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_functions(world: World, flags: tuple[str, ...]) -> tuple[list[str], str]:
    """Build a run. Returns its warnings, or the fields of a UserError."""
    kept = _Kept()
    logging.getLogger("paceline").addHandler(kept)
    try:
        build_components(quick_config(*flags), world)
    except UserError as error:
        return kept.lines, f"{error.what}; {error.where}; {error.got}; {error.allowed}; {error.hint}"
    finally:
        logging.getLogger("paceline").removeHandler(kept)
    return kept.lines, ""


def check_each(world: World, file: str, flag: str, names: list[str]) -> dict[str, tuple[list[str], str]]:
    return {name: check_functions(world, (flag, f"{file}:{name}")) for name in names}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return str(path)


def test_only_a_loss_that_is_not_a_mean_gets_a_warning(file: str) -> None:
    """Class weights, sums, contrastive losses, batch statistics and fixed batch sizes warn once. Means do not."""
    (found,) = run_ranks(1, check_each, file, "--loss", [*MEANS, *NOT_MEANS])
    assert {name: (len(lines), error) for name, (lines, error) in found.items()} == {
        **dict.fromkeys(MEANS, (0, "")),
        **dict.fromkeys(NOT_MEANS, (1, "")),
    }
    assert all(f"{file}:{name}" in line for name in NOT_MEANS for line in found[name][0])


def test_only_the_primary_warns(file: str) -> None:
    """One line per run, also in mixed precision and under --exact."""
    for flags in [("--amp-dtype=bf16",), ("--exact", "--lanes=4")]:
        primary, other = run_ranks(2, check_functions, (f"--loss={file}:weighted", *flags))
        assert (len(primary[0]), primary[1]) == (1, "")
        assert other == ([], "")
    assert "--lanes 4" in primary[0][0]


def test_unusable_values_are_refused_before_the_first_step(file: str) -> None:
    """Wrong type, shape or device, or an exception only in evaluation: a UserError with the function's name."""
    for flag, names in [("--loss", WRONG_LOSSES), ("--metrics", WRONG_METRICS)]:
        (found,) = run_ranks(1, check_each, file, flag, names)
        assert {name for name, (_, error) in found.items() if f"{file}:{name}" in error} == set(names)
        assert {name for name, (_, error) in found.items() if f"{file}, line " in error} == set(names)
        assert [name for name, (_, error) in found.items() if error.endswith("; None")] == [], "each has a try: line"


def test_a_metric_that_depends_on_its_batch_gets_a_warning(file: str) -> None:
    """The batches of an evaluation depend on the ranks. A value that depends on the batch depends on the ranks."""
    names = ["right", "per_sample", "rank_in_batch"]
    (found,) = run_ranks(1, check_each, file, "--metrics", names)
    assert [len(found[name][0]) for name in names] == [0, 0, 1]


def test_the_check_changes_no_bit_of_a_run(file: str, tmp_path: Path) -> None:
    """A loss that counts its calls and draws random numbers trains the same weights with and without the check."""
    flags = (f"--loss={file}:counts_and_draws", f"--metrics={file}:right", "--epochs=1")
    hashes = {}
    for name in ("looked_at", "not"):
        function = train_in if name == "looked_at" else train_without_a_check
        run_ranks(1, function, str(tmp_path / name), flags)
        results = read_results(tmp_path / name)
        hashes[name] = [results[key] for key in ("weights_sha256", "test_loss")]
    assert hashes["looked_at"] == hashes["not"]


def train_without_a_check(world: World, folder: str, flags: tuple[str, ...]) -> None:
    from paceline.training import components as components

    components.check_objective = lambda *_: None  # type: ignore[attr-defined,assignment]
    train_in(world, folder, flags)


@pytest.mark.parametrize("name", ["drawn_by_python", "drawn_by_numpy"])
def test_a_loss_with_random_numbers_resumes_with_the_same_numbers(name: str, file: str, tmp_path: Path) -> None:
    """The stopped and resumed run ends with the same bits."""
    flags = ("--loss", f"{file}:{name}", "--max-steps")
    (whole,) = run_ranks(1, train_in, str(tmp_path / "whole"), (*flags, "6"))
    run_ranks(1, train_in, str(tmp_path / "halves"), (*flags, "3"))
    (halves,) = run_ranks(1, train_in, str(tmp_path / "halves"), (*flags, "6"), True)
    assert halves["weights_sha256"] == whole["weights_sha256"]
