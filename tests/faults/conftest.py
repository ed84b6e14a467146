"""Finished runs: one with several checkpoints, to damage or resume it, and the one into which faults are injected."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from faults.finished_run import FLAGS, NEWEST, STEPS
from harness.ranks import run_ranks
from harness.runs import quick_config, train_in
from harness.short_run import run_undisturbed
from paceline.checkpoints.format import step_folders, step_of
from paceline.settings.load import to_yaml


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 18 steps with checkpoints at steps 9, 12, 16 and 18."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_ranks(1, train_in, str(folder), FLAGS)
    (folder / "config.yaml").write_text(to_yaml(quick_config(*FLAGS)))
    assert [step_of(path) for path in step_folders(folder / "checkpoints")] == STEPS
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of that run. Files that no test damages are hard links."""

    def copy(source: str, target: str) -> None:
        (shutil.copy2 if NEWEST in source or "checkpoints" not in source else os.link)(source, target)

    shutil.copytree(finished_run, tmp_path / "run", symlinks=True, copy_function=copy)
    return tmp_path / "run"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The result of the short run, into which tests inject faults, without a fault."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))
