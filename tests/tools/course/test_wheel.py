"""`pip install` includes the course: the lessons are in the wheel, where the package looks for them."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from harness.cli import command
from paceline.tools.course.lessons import LESSONS

pytestmark = pytest.mark.course
ROOT = Path(__file__).resolve().parents[3]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def test_the_wheel_has_every_lesson_and_the_command_finds_them(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # a copy, because the build leaves folders
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("src", "course"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    built = command(sys.executable, "-c", BUILD, str(tmp_path), cwd=tree)
    assert built.code == 0, built.err
    place = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(place)
    shown = command(
        *(sys.executable, "-c", "import paceline.tools.course.lessons as l; print(l.find_home())"),
        cwd=tmp_path,
        PYTHONPATH=f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )
    home = place / "paceline" / "tools" / "course" / "lessons"
    assert shown.out.strip() == str(home)
    for lesson in LESSONS:
        for path in (lesson.page, lesson.exercise, lesson.solution, lesson.folder / "picture.svg"):
            assert (home / lesson.folder.name / path.name).read_bytes() == path.read_bytes()
    assert (home / LESSONS[9].folder.name / "task.py").is_file()
    assert (home / LESSONS[6].folder.name / "measured.csv").is_file()
    assert not list(home.rglob(".*")), "the wheel has no caches"
