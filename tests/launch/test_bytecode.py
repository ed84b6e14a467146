"""Bytecode is cached if Python cannot write it, for example in an image. Otherwise Python writes its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from paceline.runs.interpreter import keep_bytecode
keep_bytecode()
import a_module_of_mine
print(sys.pycache_prefix, os.environ.get("PYTHONDONTWRITEBYTECODE"), os.environ.get("PYTHONPYCACHEPREFIX"))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a package named torch without bytecode, and a module to compile."""
    folder = tmp_path / "packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("")
    (folder / "a_module_of_mine.py").write_text("")
    return folder


def ask(folder: Path, cache: Path, **more: str) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    surroundings = {**inherited, "PYTHONPATH": str(folder), "PACELINE_CACHE": str(cache), **more}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=surroundings, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bytecode_is_in_our_cache_if_python_cannot_write_its_own(tmp_path: Path, stand_in: Path) -> None:
    kept = str(tmp_path / "cache" / "bytecode")
    # Child processes inherit it.
    assert ask(stand_in, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1") == [kept, "None", kept]
    assert len(list(Path(kept).rglob("a_module_of_mine.*.pyc"))) == 1
    assert not list(stand_in.rglob("*.pyc"))


def test_python_writes_its_own_bytecode_if_it_can(tmp_path: Path, stand_in: Path) -> None:
    assert ask(stand_in, tmp_path / "cache") == ["None", "None", "None"]
    assert len(list(stand_in.rglob("a_module_of_mine.*.pyc"))) == 1
    assert not (tmp_path / "cache").exists()


def test_an_installation_with_bytecode_is_not_changed(tmp_path: Path, stand_in: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(stand_in)], check=True)
    assert ask(stand_in, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1") == ["None", "1", "None"]


def test_a_read_only_cache_is_no_error(tmp_path: Path, stand_in: Path) -> None:
    (tmp_path / "file").write_text("")
    assert ask(stand_in, tmp_path / "file", PYTHONDONTWRITEBYTECODE="1") == ["None", "1", "None"]
