"""The wheel and the source package of `python -m build` install into an empty environment, and train there."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from harness.cli import command
from harness.runs import read_results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
PAUSES_S = (5, 15, 45)  # package indexes sometimes answer "too many requests"


def install(python: Path, *arguments: str) -> None:
    for pause_s in (*PAUSES_S, None):
        answer = command(str(python), "-m", "pip", "install", "--quiet", *arguments, cwd=python.parent, timeout_s=600)
        if answer.code == 0:
            return
        if pause_s is None:
            raise AssertionError(answer.err)
        time.sleep(pause_s)


def test_wheel_and_source_package_train_in_an_empty_environment(tmp_path: Path) -> None:
    """Everything that a run needs is in both packages, and they give the same weights."""
    tree = tmp_path / "tree"  # a copy, because the build leaves folders
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("src", "course"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    built = command(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), cwd=tree, timeout_s=300)
    assert built.code == 0, built.err
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    environment = tmp_path / "environment"
    assert command(sys.executable, "-m", "venv", str(environment), cwd=tmp_path, timeout_s=120).code == 0
    python = environment / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    install(python, str(wheel), "--constraint", constraints)
    weights = {}
    for package in (wheel, source):
        if package == source:  # builds a wheel first, with the setuptools of this environment
            install(python, "setuptools", "--constraint", constraints)
            install(python, "--force-reinstall", "--no-deps", "--no-build-isolation", str(source))
        flags = ("--num-samples=2000", "--epochs=1", "--processes=2", f"--output-dir={package.suffix}-run")
        answer = command(str(environment / "bin" / "paceline"), "train", *flags, cwd=tmp_path, timeout_s=300)
        assert answer.code == 0, answer
        weights[package] = read_results(tmp_path / f"{package.suffix}-run")["weights_sha256"]
    assert weights[wheel] == weights[source]
