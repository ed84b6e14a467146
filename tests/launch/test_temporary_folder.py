"""A run folder that is removed with its task (PACELINE_TEMPORARY_FOLDER=1): no message names the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline

MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)
        self.passes = 0

    def forward(self, inputs):
        self.passes += 1
        if self.passes == {fails_at}:
            raise RuntimeError("an odd end")
        return self.layer(inputs.flatten(1))

def build(num_classes, input_shape):
    return Model()
"""
FEW = ["--epochs=2", "--num-samples=256", "--global-batch-size=64", "--processes=1", "--max-restarts=0"]


@pytest.mark.parametrize(("fails_at", "code"), [(0, 0), (3, 70)])
def test_no_message_names_the_folder(fails_at: int, code: int, tmp_path: Path) -> None:
    """A run that finishes, and a run whose traceback would otherwise be in a file."""
    (tmp_path / "model.py").write_text(MODEL.format(fails_at=fails_at))
    flags = [*FEW, "--model-name=model.py:build", "--output-dir=soon-gone"]
    answer = paceline("train", "shapes-cnn", *flags, cwd=tmp_path, PACELINE_TEMPORARY_FOLDER="1")
    assert answer.code == code, answer
    assert "soon-gone" not in answer.out + answer.err
    assert ("\n  trace: " in answer.err and "line 13, in forward" in answer.err) == bool(fails_at)
