"""A run uses the code that trained it, not a later version of the file and not a file of the working folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import paceline
from harness.cli import paceline as run_command
from harness.forged import rewrite_state
from paceline.cli.main import main
from paceline.errors import Cause, UserError
from paceline.training.reuse import evaluate_run, open_run

USER = 2
FLAGS = ["--num-samples=128", "--epochs=1", "--global-batch-size=64", "--processes=1", "--track"]
# Every import rewrites the files, like an editor between the import and the first checkpoint.
SAVED_AGAIN = """\
for place in {places!r}:
    with open(place, "a") as file:
        file.write("# saved again\\n")
"""
NET = """\
from torch import nn

import sc_helper


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.head = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_classes)

    def forward(self, inputs):
        import sc_late.scales

        return sc_late.scales.scaled(self.head(inputs.flatten(1)))


def build(num_classes, input_shape):
    return Net(num_classes, input_shape)
"""
SCALES = "def scaled(logits):\n    return 2.0 * logits\n"
HOSTILE = "from pathlib import Path\n\nPath({!r}).touch()\n\n\ndef scaled(logits):\n    return -logits\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose forward imports a package, and whose files change during the import."""
    home = tmp_path_factory.mktemp("stored")
    source = home / "source"
    (source / "sc_late").mkdir(parents=True)
    places = [str(source / name) for name in ("net.py", "sc_helper.py", "sc_late/scales.py")]
    (source / "net.py").write_text(NET + SAVED_AGAIN.format(places=places))
    (source / "sc_helper.py").write_text("")
    (source / "sc_late" / "scales.py").write_text(SCALES)
    flags = ["--model-name=source/net.py:build", *FLAGS, "--output-dir=run"]
    answer = run_command("train", "shapes-cnn", *flags, cwd=home, env=state(home))
    assert answer.code == 0, answer.err
    assert "# saved again" in (source / "sc_late" / "scales.py").read_text()
    Image.new("RGB", (32, 32), "red").save(home / "picture.png")
    return home


def state(home: Path) -> dict[str, str]:
    return {"PACELINE_STATE": str(home / "state"), "PYTHONPATH": str(home / "source")}


@pytest.fixture
def copied(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run in a working folder with another sc_late, which Python would import."""
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    shutil.copy(trained / "picture.png", tmp_path)
    (tmp_path / "sc_late").mkdir()
    (tmp_path / "sc_late" / "scales.py").write_text(HOSTILE.format(str(tmp_path / "executed")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PACELINE_STATE", str(trained / "state"))
    return tmp_path


def test_the_stored_source_is_the_compiled_source(trained: Path) -> None:
    """Also for a module that the first step imports. The hash for the resume is of the same bytes."""
    texts = paceline.load_run(trained / "run").source()
    assert sorted(name.partition(" ")[2] for name in texts) == [
        "(net.py)",
        "(sc_helper.py)",
        "(sc_late)",
        "(scales.py)",
    ]
    assert texts["sc_late.scales (scales.py)"] == SCALES
    assert texts["sc_helper (sc_helper.py)"] == ""
    [net] = [text for name, text in texts.items() if name.endswith("(net.py)")]
    assert not net.endswith("# saved again\n")
    digests = {"": net, "sc_helper": "", "sc_late": "", "sc_late.scales": SCALES}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in digests.items()}
    values = json.loads(max((trained / "run/checkpoints").glob("step-*/state.json")).read_text())
    expected = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    assert values["code"] == {"model_name:build": expected}


def test_forward_imports_the_stored_module(trained: Path, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In every command and in the library. The file of this name in the working folder is not executed."""
    run = paceline.load_run(copied / "run")
    inputs = torch.randn(4, 3, 32, 32)
    head = run.model().head
    assert isinstance(head, torch.nn.Linear)
    with torch.no_grad():
        assert torch.equal(run.model()(inputs), 2.0 * head(inputs.flatten(1)))
    expected = run.predict(copied / "picture.png")
    evaluation = evaluate_run(open_run(copied / "run", ["--device=cpu"]))
    assert evaluation.accuracy == json.loads((copied / "run/results.json").read_text())["test_accuracy"]
    assert main(["evaluate", "run"]) == 0
    capsys.readouterr()
    assert main(["predict", "run", "picture.png"]) == 0
    assert expected[0].label in capsys.readouterr().out
    for name in ("safetensors", "torchscript", "torch.export"):
        assert main(["export", "run", f"--format={name}"]) == 0, name
        assert "bit for bit" in capsys.readouterr().out
    assert not (copied / "executed").exists()
    assert not [name for name in sys.modules if name.startswith("sc_")]


FAILING = {
    "raises": "def scaled(logits):\n    raise RuntimeError('no GPU of mine')\n",
    "imports what is not there": "def scaled(logits):\n    import sc_not_there\n",
    "returns nothing": "def scaled(logits):\n    return None\n",
    "returns another shape": "def scaled(logits):\n    return logits[:, :1].expand(-1, 99)\n",
    "returns fewer samples": "def scaled(logits):\n    return logits[:0]\n",
    "does not compile": "def scaled(:\n",
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_stored_forward_is_reported_as_the_runs_code(
    name: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One screen and exit code 2, in every command that calls it."""

    def forge(values: dict[str, Any]) -> None:
        values["record"]["sources"]["modules"]["sc_late.scales"]["text"] = FAILING[name]

    for checkpoint in (copied / "run/checkpoints").glob("step-*"):
        rewrite_state(checkpoint, forge)
    for words in (["predict", "run", "picture.png"], ["evaluate", "run"], ["export", "run", "--format=torchscript"]):
        assert main([*words, "--trust-code"]) == USER, words
        screen = capsys.readouterr().err
        assert "net.py" in screen
        assert "Traceback" not in screen
    with pytest.raises(UserError) as refused:
        paceline.load_run(copied / "run", trust_code=True).predict(copied / "picture.png")
    assert refused.value.cause is Cause.USER_CODE
