"""Lesson 10 with a real cluster: the check submits jobs, and finds the same mistakes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.slurm import Cluster, need_slurm
from paceline.tools.course.grading import grade
from paceline.tools.course.lessons import find_lesson

pytestmark = pytest.mark.course
LESSON = find_lesson("10")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    need_slurm()
    with Cluster(nodes=2) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ("solution", ""),
        ("wrong/double_quotes", "rank-outside-srun"),
        ("wrong/own_host", "each-node-its-own-master"),
        ("wrong/only_two_started", "tasks-missing"),
    ],
)
def test_the_cluster_grades_a_script(
    answer: str, hint: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.state / "slurm.conf"))
    mine = shutil.copy(LESSON.folder / f"{answer}.sbatch", tmp_path / LESSON.file_name)
    verdict = grade(LESSON, Path(mine))
    if hint:
        assert verdict.failure is not None
        assert verdict.failure.hint == hint, verdict.failure.what
    else:
        assert verdict.failure is None, verdict.failure
        assert verdict.remarks == ["checked by a real Slurm cluster"]
    assert [path.name for path in tmp_path.iterdir()] == [LESSON.file_name], "no file remains"
