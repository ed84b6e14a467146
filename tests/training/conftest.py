"""A finished run in its working folder, for tests that change the run and use it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from harness.cli import paceline

FLAGS = ("--num-samples=128", "--epochs=1", "--global-batch-size=64", "--processes=1", "--track", "--output-dir=run")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without functions of the user, and a picture."""
    folder = tmp_path_factory.mktemp("trained")
    answer = paceline("train", "shapes-cnn", *FLAGS, cwd=folder)
    assert answer.code == 0, answer.err
    Image.new("RGB", (32, 32), "red").save(folder / "picture.png")
    return folder


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this folder, as the working folder."""
    shutil.copytree(trained, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"
