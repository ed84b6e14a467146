"""--keep-share: a proxy scores the samples; one result on any number of ranks; other proxies are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ranks import make_world, run_ranks
from harness.runs import read_results, step_losses, train_in
from paceline.data.registry import load_dataset
from paceline.errors import CheckpointError, UserError
from paceline.settings.load import load_config
from paceline.settings.rules import check_config
from paceline.settings.schema import DataConfig
from paceline.training.proxy import open_proxy, sample_losses, score_samples

COMMON = ("--dataset", "harness.task_data:rare_classes", "--global-batch-size", "32", "--augment", "light")
EXACT = ("--model-name", "cnn", "--exact", "--lanes", "2", *COMMON)


@pytest.fixture(scope="module")
def proxies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = []
    for seed in ("1", "2"):
        folder = tmp_path_factory.mktemp("proxy")
        run_ranks(1, train_in, str(folder), (*COMMON, "--model-name", "mlp", "--seed", seed))
        (folder / "config.yaml").touch()  # a run that the worker starts has one
        folders.append(folder)
    return folders


def answer(folder: Path) -> tuple[str, list[float]]:
    return read_results(folder)["weights_sha256"], step_losses(folder)


@pytest.mark.long
def test_one_and_two_ranks_and_a_resumed_run_are_equal(tmp_path: Path, proxies: list[Path]) -> None:
    keep = ("--keep-share", "0.4", "--keep-by", str(proxies[0]))
    for size in (1, 2):
        run_ranks(size, train_in, str(tmp_path / str(size)), (*EXACT, *keep))
    assert answer(tmp_path / "1") == answer(tmp_path / "2")
    stopped = str(tmp_path / "stopped")
    run_ranks(2, train_in, stopped, (*EXACT, *keep, "--max-steps", "3"))
    run_ranks(1, train_in, stopped, (*EXACT, *keep), True)
    assert answer(tmp_path / "stopped") == answer(tmp_path / "1")
    for other in (("--keep-share", "0.4", "--keep-by", str(proxies[1])), ("--keep-share", "0.5", *keep[2:])):
        with pytest.raises((CheckpointError, AssertionError), match=r"keep_by_sha256|keep_share"):
            run_ranks(1, train_in, stopped, (*EXACT, *other), True)


def test_a_share_of_one_is_the_plain_run(tmp_path: Path, proxies: list[Path]) -> None:
    run_ranks(1, train_in, str(tmp_path / "plain"), (*EXACT, "--max-steps", "3"))
    whole = ("--keep-share", "1", "--keep-by", str(proxies[0]), "--max-steps", "3")
    run_ranks(1, train_in, str(tmp_path / "whole"), (*EXACT, *whole))
    assert answer(tmp_path / "plain") == answer(tmp_path / "whole")


def test_scores_are_the_losses_whichever_rank_computes_them(proxies: list[Path]) -> None:
    proxy = open_proxy(str(proxies[0]))
    data = load_dataset(DataConfig(dataset="harness.task_data:rare_classes"), 42)
    ids = torch.arange(len(data.train)).repeat(5)  # several chunks
    calls: list[None] = []
    alone = score_samples(proxy, data.train, ids, make_world(0, 1), lambda: calls.append(None))
    assert len(calls) == -(-len(ids) // 256)
    inputs = proxy.record.pipeline.for_evaluation(data.train.read(ids[:7]))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(proxy.module(inputs), data.train.labels[:7], reduction="none")
    torch.testing.assert_close(alone[:7], expected)  # computed in a batch of another size


def test_samples_of_several_labels_and_of_numbers_have_one_loss() -> None:
    outputs, labels = torch.randn(4, 3), torch.tensor([[1.0, 0.0, 1.0]] * 4)
    assert sample_losses(outputs, labels, "multi-label").shape == (4,)
    assert torch.equal(sample_losses(outputs, labels, "regression"), (outputs - labels).square().mean(1))


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--keep-share", "0.5"], "keep_by"),
        (["--keep-random", "0.5"], "keep_share"),
        (["--keep-by", "run"], "keep_share"),
        (["--keep-share", "0.5", "--keep-by", "run", "--epoch-samples", "100"], "epoch_samples"),
        (["--keep-share", "0.5", "--keep-by", "run", "--sampling", "balanced"], "sampling"),
    ],
)
def test_settings_without_effect_are_refused(flags: list[str], word: str) -> None:
    with pytest.raises(UserError) as error:
        check_config(load_config("shapes-cnn", flags))
    assert word in json.dumps(vars(error.value), default=str)


def test_the_run_without_it_may_be_a_cell_of_a_sweep() -> None:
    check_config(load_config("shapes-cnn", ["--keep-share", "1", "--keep-by", "run"]))


def test_a_proxy_of_other_data_is_refused(tmp_path: Path, proxies: list[Path]) -> None:
    other: tuple[Any, ...] = ("--dataset", "synthetic", "--num-samples", "200", "--model-name", "mlp")
    flags = (*other, "--global-batch-size", "32", "--keep-share", "0.5", "--keep-by", str(proxies[0]))
    with pytest.raises((UserError, AssertionError), match="trained on other data"):
        run_ranks(1, train_in, str(tmp_path / "other"), flags)
