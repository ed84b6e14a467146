"""If a user's code changes the process, the run works, or ends once with exit code 2 and one screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import Answer, paceline

QUICK = ["--num-samples=640", "--global-batch-size=64", "--epochs=1", "--max-steps=2", "--processes=1", "--track"]
BUILD = """
import os, sys
import torch
from torch import nn

class Unreadable(Exception):
    def __str__(self):
        raise ValueError("no text")

class Net(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.layer = nn.Linear(inputs, classes)

    def forward(self, x):
        IN_FORWARD
        return self.layer(x.flatten(1))

AT_IMPORT

def build(num_classes, input_shape):
    IN_BUILD
    return Net(input_shape[0] * input_shape[1] * input_shape[2], num_classes)
"""
PLACES = ("AT_IMPORT", "IN_BUILD", "IN_FORWARD")
WORKS = {
    "chdir at import": ("AT_IMPORT", "os.chdir('/')"),
    "chdir in the function": ("IN_BUILD", "os.chdir('/')"),
    "stdout None at import": ("AT_IMPORT", "sys.stdout = None"),
    "stderr None at import": ("AT_IMPORT", "sys.stderr = None"),
    "stdout None in the function": ("IN_BUILD", "sys.stdout = None"),
    "stdout None in forward": ("IN_FORWARD", "sys.stdout = None"),
}
REFUSED = {
    "unreadable exception at import": ("AT_IMPORT", "raise Unreadable()"),
    "unreadable exception in the function": ("IN_BUILD", "raise Unreadable()"),
    "float64 linear": ("IN_BUILD", "return Net(3072, num_classes).double()"),
    "float64 conv": ("IN_BUILD", "return nn.Sequential(nn.Conv2d(3, num_classes, 32), nn.Flatten()).double()"),
}


def train(folder: Path, place: str, code: str, *flags: str) -> Answer:
    text = BUILD
    for name in PLACES:
        text = text.replace(name, code if name == place else "pass")
    (folder / "net.py").write_text(text)
    arguments = ["--model-name=net.py:build", "--output-dir=run", *flags]
    return paceline("train", "shapes-cnn", *QUICK, *arguments, cwd=folder)


@pytest.mark.parametrize("case", WORKS)
def test_the_run_works(case: str, tmp_path: Path) -> None:
    answer = train(tmp_path, *WORKS[case])
    assert answer.code == 0, answer
    assert (tmp_path / "run" / "results.json").is_file()
    assert not (tmp_path / "run" / "failure.json").exists()


@pytest.mark.parametrize("case", REFUSED)
def test_the_run_ends_with_one_screen(case: str, tmp_path: Path) -> None:
    answer = train(tmp_path, *REFUSED[case])
    assert answer.code == 2, answer
    assert answer.err.count("error: ") == 1, answer
    assert "net.py" in answer.err
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["attempt"] == 1
    assert failure["error"]["kind"] == "UserError"


def test_an_unreadable_exception_in_training(tmp_path: Path) -> None:
    """The first step does not prove that it is a user error, so the run is restarted. Its report has a text."""
    answer = train(tmp_path, "IN_FORWARD", "raise Unreadable()", "--max-restarts=0")
    assert answer.code == 70, answer
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["kind"] == "Unreadable"


def test_a_data_set_function(tmp_path: Path) -> None:
    code = "import os, sys, torch\nos.chdir('/')\nsys.stdout = None\n"
    code += "def make(data_dir, seed):\n    os.chdir('/')\n    sys.stdout = None\n"
    code += "    part = torch.zeros(128, 3, 8, 8, dtype=torch.uint8), torch.arange(128) % 2\n    return part, part\n"
    (tmp_path / "set.py").write_text(code)
    answer = paceline("train", "shapes-cnn", *QUICK, "--dataset=set.py:make", "--output-dir=run", cwd=tmp_path)
    assert answer.code == 0, answer
