"""Failures at the start of a run: resource limits, and runs that failed before their config was written."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from harness.cli import paceline
from paceline.cli.main import main
from paceline.errors import Cause
from paceline.launch.causes import cause_of
from paceline.runs.catalog import list_runs
from paceline.runs.folder import RunFolder

NO_THREAD = "import torch\ndef build(num_classes, input_shape):\n    return Net()\n"
NO_THREAD += "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
NO_THREAD += "        self.w = torch.nn.Parameter(torch.zeros(1))\n"
NO_THREAD += '    def forward(self, x):\n        raise RuntimeError("can\'t start new thread")\n'
QUICK = ["--num-samples=640", "--global-batch-size=64", "--epochs=1", "--processes=1", "--track"]


def refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_fake_thread_limit_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Limits do not apply to root, so the test raises Python's own error."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        assert main(["train", "synthetic-mlp", *QUICK, "--output-dir=run"]) == 2
    screen = capsys.readouterr().err
    assert "ulimit -u" in screen
    assert "unexpected" not in screen


def test_a_fake_thread_limit_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NO_THREAD)
    flags = ["--model-name=net.py:build", "--output-dir=run", "--max-restarts=0"]
    answer = paceline("train", "shapes-cnn", *QUICK, *flags, cwd=tmp_path)
    assert answer.code == 70, answer
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["cause"] == "threads"
    assert "ulimit -u" in answer.err


def test_the_error_of_fork() -> None:
    assert cause_of(BlockingIOError(11, "Resource temporarily unavailable")) is Cause.THREADS


def test_a_run_that_failed_before_its_config_was_written_is_listed_and_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs") / "early")
    folder.create()
    with folder.owned():
        folder.write_status("failed", reason="no memory", step=0, attempt=1)
    other = tmp_path / "runs" / "of-another-program"
    other.mkdir()
    (other / "status.json").write_text("{}")
    assert [(entry.name, entry.state) for entry in list_runs(Path("runs"))] == [("early", "failed")]
    assert main(["clean", "--failed", "--all", "--yes"]) == 0
    assert not folder.path.exists()
    assert other.exists()
