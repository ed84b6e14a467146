"""A run's own functions: a resume or an evaluation with another file than before says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from harness.ranks import make_world
from harness.runs import train_in
from paceline.training.reuse import open_run

LOSS = "from torch.nn import functional as F\n\n\ndef focal(logits, labels):\n"
LOSS += "    return F.cross_entropy(logits, labels)\n"
METRIC = "def hit(logits, labels):\n    return (logits.argmax(1) == labels).float()\n"


def go_on(home: Path, steps: int, *, resume: bool = True) -> None:
    flags = (f"--loss={home}/own.py:focal", f"--metrics={home}/hit.py:hit", f"--max-steps={steps}", "--save-steps=1")
    train_in(make_world(0, 1), str(home / "run"), flags, resume)


def newest_code(home: Path) -> dict[str, Any]:
    code: dict[str, Any] = json.loads(max((home / "run/checkpoints").glob("step-*/state.json")).read_text())["code"]
    return code


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def home(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """A run of two steps with a loss and a metric in files of their own."""
    (tmp_path / "own.py").write_text(LOSS)
    (tmp_path / "hit.py").write_text(METRIC)
    go_on(tmp_path, 2, resume=False)
    caplog.clear()
    return tmp_path


def test_the_same_functions_resume_without_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint keeps a hash of each file."""
    assert sorted(newest_code(home)) == ["loss:focal", "metrics:hit"]
    go_on(home, 3)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(("file", "text", "name"), [("own.py", LOSS, "focal"), ("hit.py", METRIC, "hit")])
def test_a_changed_file_is_named_at_the_resume(
    home: Path, caplog: pytest.LogCaptureFixture, file: str, text: str, name: str
) -> None:
    """Once: the next checkpoint has the new hash."""
    before = newest_code(home)
    (home / file).write_text(text + "\n# another\n")
    go_on(home, 3)
    (warning,) = warnings_in(caplog)
    assert f"{file}:{name}" in warning
    assert newest_code(home) != before
    caplog.clear()
    go_on(home, 4)
    assert warnings_in(caplog) == []


def test_a_changed_loss_is_named_when_the_run_is_evaluated(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test loss would be of another function than the run's."""
    (home / "run" / "config.yaml").write_text(_config(home))
    (home / "own.py").write_text(LOSS + "\n# another\n")
    open_run(home / "run", [], trust_code=True)
    (warning,) = warnings_in(caplog)
    assert "own.py:focal" in warning


def test_a_checkpoint_without_hashes_is_resumed(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints of older versions have none, and a new function of a run has none yet."""
    from paceline.checkpoints.identity import changed_code

    assert changed_code({}, {"loss:focal": "a"}) == []
    assert changed_code({"code": {"loss:focal": "a"}}, {"loss:focal": "a", "metrics:hit": "b"}) == []
    assert changed_code({"code": ["forged"]}, {"loss:focal": "a"}) == []
    assert changed_code({"code": {"loss:focal": "a"}}, {"loss:focal": "b"}) == ["loss:focal"]


def _config(home: Path) -> str:
    from harness.runs import QUICK
    from paceline.settings.load import load_config, to_yaml

    return to_yaml(load_config("shapes-cnn", [*QUICK, f"--loss={home}/own.py:focal"]).config)


def test_a_changed_model_is_named_when_the_library_opens_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`run.model()` and `run.predict()` build the model from the file as it is now."""
    from harness.runs import QUICK
    from paceline.library.predictions import open_model
    from paceline.settings.load import load_config, to_yaml

    code = "import torch\n\n\ndef build(num_classes, input_shape):\n    return torch.nn.Sequential(torch.nn.Flatten(), "
    code += "torch.nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_classes))\n"
    (tmp_path / "net.py").write_text(code)
    model = f"--model-name={tmp_path}/net.py:build"
    train_in(make_world(0, 1), str(tmp_path / "run"), (model, "--max-steps=1"))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load_config("shapes-cnn", [*QUICK, model]).config))
    caplog.clear()
    open_model(tmp_path / "run", "latest", trust_code=True)
    assert warnings_in(caplog) == []
    (tmp_path / "net.py").write_text(code + "# another\n")
    open_model(tmp_path / "run", "latest", trust_code=True)
    (warning,) = warnings_in(caplog)
    assert "net.py:build" in warning
