"""A user's functions: a resume with a changed file warns, an evaluation uses the stored source."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ranks import make_world
from harness.runs import train_in
from paceline.training.reuse import evaluate_run, open_run

LOSS = "from torch.nn import functional as F\n\n\ndef focal(logits, labels):\n"
LOSS += "    return F.cross_entropy(logits, labels)\n"
METRIC = "def hit(logits, labels):\n    return (logits.argmax(1) == labels).float()\n"


def train_to(home: Path, steps: int, *, resume: bool = True) -> None:
    flags = (f"--loss={home}/own.py:focal", f"--metrics={home}/hit.py:hit", f"--max-steps={steps}", "--save-steps=1")
    train_in(make_world(0, 1), str(home / "run"), flags, resume)


def newest_code(home: Path) -> dict[str, Any]:
    code: dict[str, Any] = json.loads(max((home / "run/checkpoints").glob("step-*/state.json")).read_text())["code"]
    return code


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def home(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """A run of two steps with a loss and a metric in separate files."""
    (tmp_path / "own.py").write_text(LOSS)
    (tmp_path / "hit.py").write_text(METRIC)
    train_to(tmp_path, 2, resume=False)
    caplog.clear()
    return tmp_path


def test_the_same_functions_resume_without_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint keeps a hash of each file."""
    assert sorted(newest_code(home)) == ["loss:focal", "metrics:hit"]
    train_to(home, 3)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(("file", "text", "name"), [("own.py", LOSS, "focal"), ("hit.py", METRIC, "hit")])
def test_a_changed_file_is_named_at_the_resume(
    home: Path, caplog: pytest.LogCaptureFixture, file: str, text: str, name: str
) -> None:
    """One warning only: the next checkpoint has the new hash."""
    before = newest_code(home)
    (home / file).write_text(text + "\n# another\n")
    train_to(home, 3)
    (warning,) = warnings_in(caplog)
    assert f"{file}:{name}" in warning
    assert newest_code(home) != before
    caplog.clear()
    train_to(home, 4)
    assert warnings_in(caplog) == []


def test_an_evaluation_uses_the_loss_of_the_training(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint stores its source. A changed or deleted file has no effect."""
    before = evaluate_run(open_run(home / "run/checkpoints/latest", ["--device=cpu"], trust_code=True)).loss
    (home / "own.py").write_text(LOSS.replace("return ", "return 2 * "))
    assert evaluate_run(open_run(home / "run/checkpoints/latest", ["--device=cpu"], trust_code=True)).loss == before
    (home / "own.py").unlink()
    (home / "hit.py").unlink()
    assert evaluate_run(open_run(home / "run/checkpoints/latest", ["--device=cpu"], trust_code=True)).loss == before
    assert warnings_in(caplog) == []


def test_a_checkpoint_without_hashes_is_resumed(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints of older versions have no hashes, and a new function has no hash yet."""
    from paceline.checkpoints.identity import changed_code

    assert changed_code({}, {"loss:focal": "a"}) == []
    assert changed_code({"code": {"loss:focal": "a"}}, {"loss:focal": "a", "metrics:hit": "b"}) == []
    assert changed_code({"code": ["forged"]}, {"loss:focal": "a"}) == []
    assert changed_code({"code": {"loss:focal": "a"}}, {"loss:focal": "b"}) == ["loss:focal"]


def test_the_library_opens_the_model_of_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`run.model()` and `run.predict()` build the model from the stored source."""
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
    (tmp_path / "net.py").write_text(code.replace("Linear", "LazyLinear"))
    assert isinstance(open_model(tmp_path / "run", "latest", trust_code=True).model[1], torch.nn.Linear)  # type: ignore[index]
    assert warnings_in(caplog) == []
