"""Cells of a study on Slurm are comparable: the same threads and exclusive nodes. No cluster is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.cli import paceline

STUDY = ("study", "synthetic-mlp", "--on=slurm", "--world-sizes=1,2,4", "--processes-per-node=2", "--dry-run")


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        ((), 1),
        (("--cpus-per-task=4",), 2),  # an agent's two ranks share them
        (("--cpus-per-task=4", "--omp-num-threads=3"), 3),
    ],
)
def test_every_cell_has_the_same_threads(flags: tuple[str, ...], threads: int, tmp_path: Path) -> None:
    """A rank alone on its node gets no more threads than one of two."""
    answer = paceline(*STUDY, *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    found = re.findall(r"--omp-num-threads[= ](\d+)", answer.out)
    assert len(found) >= 3, answer.out
    assert set(found) == {str(threads)}


def test_cells_have_exclusive_nodes(tmp_path: Path) -> None:
    answer = paceline(*STUDY, cwd=tmp_path)
    assert answer.out.count("#SBATCH --exclusive\n") == 3, answer.out


@pytest.mark.parametrize("line", ["--oversubscribe", "--exclusive=user"])
def test_a_site_may_allow_shared_nodes(line: str, tmp_path: Path) -> None:
    """Then the study says that times depend on it."""
    answer = paceline(*STUDY, f"--sbatch={line}", cwd=tmp_path)
    assert answer.code == 0, answer
    assert answer.out.count(f"#SBATCH {line}\n") == 3
    assert "#SBATCH --exclusive\n" not in answer.out
    assert "cells may share nodes" in answer.out
    assert "for itself" not in answer.out
