"""Settings that name parts of a model: a mistake gives one error screen, and nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline

FLAT = """
from torch import nn


class Flat(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Conv2d(3, num_classes, 32)

    def forward(self, x):
        return self.layer(x).flatten(1)


def build(num_classes):
    return Flat(num_classes)
"""
FLAT_MODEL = ("--model-name", "flat.py:build")
CASES = {
    "freeze nothing": ("--freeze", "layer1"),
    "freeze everything": ("--freeze", "*"),
    "no layers": (*FLAT_MODEL, "--layer-decay", "0.5"),
    "no head": (*FLAT_MODEL, "--head-lr-factor", "2"),
    "no blocks": (*FLAT_MODEL, "--activation-checkpointing"),
    "unknown patch": ("--model-name", "vit-ti16", "--model-args", "patch_size=5"),
    "no validation": ("--stop-early", "2", "--train-split", "1"),
    "unknown argument": (*FLAT_MODEL, "--model-args", "width=2"),
    "schedule": ("--epochs", "3", "--schedule", "steps", "--lr-steps", "3"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_a_mistake_gives_one_screen_and_no_run(tmp_path: Path, case: str, processes: str) -> None:
    (tmp_path / "flat.py").write_text(FLAT)
    flags = ("--num-samples", "640", "--processes", processes, "--output-dir", "run")
    answer = paceline("train", "shapes-cnn", *flags, *CASES[case], cwd=tmp_path)
    assert answer.code == 2
    assert answer.err.count("error:") == 1
    assert not (tmp_path / "run" / "results.json").exists()
    if FLAT_MODEL[1] not in CASES[case]:  # a user's function is called only in the ranks
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["freeze nothing", "no layers", "no validation"])
def test_plan_refuses_the_same_mistakes(tmp_path: Path, case: str) -> None:
    (tmp_path / "flat.py").write_text(FLAT)
    answer = paceline("plan", "shapes-cnn", *CASES[case], cwd=tmp_path)
    assert answer.code == 2
