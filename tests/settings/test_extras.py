"""Messages name the command that adds an extra to this installation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.settings import extras

ROOT = Path(__file__).resolve().parents[2]


def test_an_installed_package_and_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "_CLONE", tmp_path / "my clone")
    assert extras.how_to_install("onnx") == "pip install 'paceline[onnx]'"
    (tmp_path / "my clone").mkdir()
    (tmp_path / "my clone" / "pyproject.toml").touch()
    clone = f"{tmp_path}/my clone"
    assert shlex.split(extras.how_to_install("s3"))[2:] == [
        "-e",
        f"{clone}[s3]",
        "-c",
        f"{clone}/constraints-flows.txt",
    ]
    monkeypatch.chdir(clone)
    assert extras.how_to_install("onnx") == "pip install -e '.[onnx]' -c constraints.txt"


def test_every_named_extra_exists_and_no_message_has_its_own_command() -> None:
    sources = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    named = {name for text in sources.values() for name in re.findall(r"how_to_install\(['\"](\w+)", text)}
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert named <= set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))
    own = [path.name for path, text in sources.items() if re.search(r"hint ?= ?f?\"pip install 'paceline\[", text)]
    assert own == []
