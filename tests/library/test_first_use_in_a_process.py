"""The first use of a run imports torch's own modules. The caller's process keeps its variables and warning filters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.cli import command, paceline
from paceline.errors import DataError, UserError, error_from_json

pytestmark = pytest.mark.long

QUICK = ("synthetic-mlp", "--num-samples=640", "--global-batch-size=64", "--epochs=1", "--processes=1", "--track")
USES = {
    "model": "run.model()",
    "evaluate": "run.evaluate()",
    "export": "run.export(output='exported')",
}
SCRIPT = """
import json, os, sys, warnings
import torch, paceline


def state():
    return json.dumps([dict(os.environ), [str(row) for row in warnings.filters]])

before = state()
run = paceline.load_run("run")
USE
if state() != before:
    sys.exit(f"{before} became {state()}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first-use")
    answer = paceline("train", *QUICK, "--output-dir=run", cwd=folder)
    assert answer.code == 0, answer
    return folder


@pytest.mark.parametrize("use", USES)
def test_variables_and_filters_are_unchanged(use: str, folder: Path) -> None:
    answer = command(sys.executable, "-c", SCRIPT.replace("USE", USES[use]), cwd=folder)
    assert answer.code == 0, answer


def test_the_text_of_an_error_is_its_complete_screen() -> None:
    error = UserError("too large", where="flag --x", got=5, allowed="1 to 4", hint="--x 4")
    assert "error: " + str(error) == error.screen()
    assert [line.split(":")[0].strip() for line in str(error).splitlines()[1:]] == ["where", "got", "allowed", "try"]
    again = error_from_json(json.loads(json.dumps(error.to_json())))
    assert (str(again), again.what) == (str(error), "too large")
    assert str(DataError("gone")) == "gone"
