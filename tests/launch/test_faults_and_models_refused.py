"""Requests that cannot work end with exit code 2 at the first attempt. An injected fault is reported as injected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import Answer, paceline

CODE = """\
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(64, classes)

    def forward(self, inputs):
        return self.scale * self.layer(inputs.flatten(1)[:, :64])


def scaled(num_classes):
    return Scaled(num_classes)


def too_few():
    return Scaled(5)


class Wide(Scaled):
    def forward(self, inputs):
        return self.layer(inputs.flatten(1)[:, :3])


def wrong_input(num_classes):
    return Wide(num_classes)


def no_gradient(logits, labels):
    return (logits.argmax(1) != labels).float()
"""
FLAGS = ["train", "synthetic-mlp", "--num-samples=2000", "--epochs=1", "--processes=2", "--output-dir=run"]


def train(folder: Path, *flags: str) -> Answer:
    (folder / "own.py").write_text(CODE)
    return paceline(*FLAGS, *flags, cwd=folder)


def failures(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "failures.jsonl").read_text().splitlines()]


def test_a_scalar_parameter_under_fsdp_is_refused(tmp_path: Path) -> None:
    """torch refuses it in each attempt. The screen names the parameter."""
    answer = train(tmp_path, "--strategy=fsdp", "--model-name=own.py:scaled")
    assert answer.code == 2, answer
    assert "scale" in answer.err
    assert len(failures(tmp_path)) == 1


def test_a_fault_for_a_missing_rank_is_refused(tmp_path: Path) -> None:
    """It would never be injected. No process is started."""
    answer = train(tmp_path, "--inject=kill rank=9 step=3")
    assert answer.code == 2, answer
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("fault", "cause"), [("kill", "rank-killed"), ("exit", "rank-exited")])
def test_an_injected_end_is_reported_as_injected(fault: str, cause: str, tmp_path: Path) -> None:
    """The report does not suggest dmesg for a signal that --inject has sent."""
    answer = train(tmp_path, f"--inject={fault} rank=1 step=3", "--max-restarts=0")
    assert answer.code == 70, answer
    (failure,) = failures(tmp_path)
    assert (failure["cause"], failure["rank"], failure["hint"]) == (cause, 1, None)
    assert f"{fault} (rank 1, step 3)" in str(failure["what"])


@pytest.mark.parametrize(
    "flag", ["--model-name=own.py:too_few", "--model-name=own.py:wrong_input", "--loss=own.py:no_gradient"]
)
def test_a_model_or_loss_that_cannot_be_trained_is_a_user_error(flag: str, tmp_path: Path) -> None:
    """Too few outputs, a wrong input, a loss without a gradient: exit code 2 after one attempt, with the name."""
    answer = train(tmp_path, flag)
    assert answer.code == 2, answer
    assert flag.partition("=")[2] in answer.err
    assert len(failures(tmp_path)) == 1
