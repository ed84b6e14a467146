"""A run folder from another user must not execute code or write elsewhere without --trust-code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from harness.forged import rewrite_state
from paceline.cli.main import main
from paceline.errors import UserError

USER, CHECKPOINT = 2, 4
HOSTILE = "from pathlib import Path\n\nPath({!r}).touch()\n"


@pytest.fixture
def home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With another key: the run was trained elsewhere."""
    monkeypatch.setenv("PACELINE_STATE", str(tmp_path / "state"))
    return home


@pytest.mark.parametrize("name", ["json", "contextlib", "onnx", "torch.export._trace", "sympy"])
@pytest.mark.parametrize("format_name", ["torch.export", "torchscript"])
def test_stored_modules_without_a_function_are_refused(name: str, format_name: str, home: Path) -> None:
    """An exporter imports modules by name while the stored modules are importable."""
    text = HOSTILE.format(str(home / "executed"))

    def forge(values: dict[str, Any]) -> None:
        values["record"]["sources"]["modules"] = {name: {"text": text, "file": "x.py", "is_package": False}}

    for checkpoint in (home / "run/checkpoints").glob("step-*"):
        rewrite_state(checkpoint, forge)
    code = main(["export", "run", f"--format={format_name}"])
    assert not (home / "executed").exists()
    assert code == CHECKPOINT


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_does_not_follow_a_link_out_of_the_run_folder(home: Path, exists: bool) -> None:
    target = home / "elsewhere"
    if exists:
        target.mkdir()
    (home / "run" / "export-safetensors").symlink_to(target)
    assert main(["export", "run", "--format=safetensors", "--force"]) == USER
    with pytest.raises(UserError):
        paceline.load_run(home / "run").export(force=True)
    assert not target.exists() or not list(target.iterdir())
