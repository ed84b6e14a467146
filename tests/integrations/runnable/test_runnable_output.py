"""PACELINE_OUTPUT for a pipeline: which lines of Runnable and of the steps are printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli import command
from harness.runnable_pipelines import STEPS, Pipeline, copy_example, start_pipeline

pytestmark = [pytest.mark.flows, pytest.mark.timeout(300)]  # on a busy machine
NEEDS = ("runnable",)
RESULT = ["recipe", "accuracy", "time", "weights", "folder"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return start_pipeline(copy_example(tmp_path_factory.mktemp("quiet")), "one", PACELINE_OUTPUT="quiet")


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()]


def test_quiet_prints_only_the_result(quiet: Pipeline) -> None:
    """Five lines, and nothing on standard error."""
    assert quiet.answer.code == 0, quiet.answer
    assert first_words(quiet.answer.out) == RESULT
    assert quiet.answer.err == ""


def test_hidden_output_is_in_a_file(quiet: Pipeline) -> None:
    """Runnable's output in pipeline.log, the training's in training_output.log, complete."""
    log = (quiet.folder / "pipeline.log").read_text()
    assert "Working with context" in log
    assert f"step {STEPS}/{STEPS}" in log
    steps = [line for line in (quiet.catalog / "training_output.log").read_text().splitlines() if line[:5] == "step "]
    assert len(steps) == STEPS


def test_brief_prints_the_steps_output_in_under_thirty_lines(tmp_path: Path) -> None:
    """A line per epoch, none per training step, none of Runnable's."""
    brief = start_pipeline(copy_example(tmp_path), "one", PACELINE_OUTPUT="brief")
    assert brief.answer.code == 0, brief.answer
    words = first_words(brief.answer.out)
    assert words[-5:] == RESULT
    assert len(words) < 30
    assert words.count("epoch") == 2
    assert {"data", "model", "metrics", "test"} <= set(words)
    assert "step" not in words
    assert "Working" not in words


def test_quiet_prints_a_failure(tmp_path: Path) -> None:
    """Its exit code, one screen, and how to continue. The log of the pipeline has the rest."""
    faults = {"RUNNABLE_PRM_INJECT": "kill rank=1 step=5", "RUNNABLE_PRM_MAX_RESTARTS": "0"}
    failed = start_pipeline(copy_example(tmp_path), "one", PACELINE_OUTPUT="quiet", **faults)
    assert failed.answer.code == 70
    assert failed.answer.out == ""
    assert failed.answer.err.startswith("error: a step of the pipeline failed\n")
    assert "RUNNABLE_RETRY_RUN_ID=one" in failed.answer.err
    assert "rank 1 was ended by SIGKILL" in (failed.folder / "pipeline.log").read_text()


def test_a_folder_with_the_name_of_runnable_is_refused_at_once(tmp_path: Path) -> None:
    """`cp -r examples/runnable .` would hide the package of that name."""
    copy_example(tmp_path / "runnable")
    answer = command(sys.executable, "runnable/pipeline.py", cwd=tmp_path)
    assert answer.code == 2
    assert answer.err.startswith("error: a pipeline cannot be in a folder named runnable")
