"""Lesson 4's options of FSDP: predictions, measured numbers, and partly filled files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.tools.course.grading import grade
from paceline.tools.course.lessons import find_lesson
from paceline.tools.course.verdict import find_gaps

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("rank_server")]
LESSON = find_lesson("4")
_CHOICES = "# --- Choices under FSDP"


def test_wrong_predictions_pass_and_are_shown_next_to_the_measurements(tmp_path: Path) -> None:
    """Predictions are not graded. The table has one row per option, in a terminal of 80 columns."""
    path = tmp_path / "mine.py"
    path.write_text(LESSON.solution.read_text().replace("GATHERS_IF_DROPPED = 9", "GATHERS_IF_DROPPED = 7"))
    verdict = grade(LESSON, path)
    assert verdict.failure is None, f"{verdict.failed}: {verdict.failure}"
    lines = verdict.remarks[0].splitlines()
    assert max(map(len, lines)) <= 70
    pairs = [
        (found[1], int(found[2]), int(found[3]))
        for line in lines
        if (found := re.match(r"([A-Z_]+) +(\d+) +(\d+)$", line))
    ]
    assert pairs == [
        ("BLOCKS_WHOLE_AT_ONCE", 1, 1),
        ("BYTES_PER_GATHERED_WEIGHT", 2, 2),
        ("GATHERS_IF_DROPPED", 7, 9),
        ("GATHERS_IF_KEPT", 5, 5),
    ]
    rows = [line.split()[:6] for line in lines if line.split()[0] in ("model", "blocks", "layers")]
    # Bytes of one rank: weights are gathered once or twice, gradients always in float32. Half of each is received.
    assert rows == [
        ["model", "float32", "kept", "1", "2.4", "2.4"],
        ["blocks", "float32", "dropped", "9", "0.8", "3.4"],
        ["blocks", "bfloat16", "dropped", "9", "0.4", "2.3"],
        ["blocks", "bfloat16", "kept", "5", "1.2", "1.8"],
        ["layers", "bfloat16", "dropped", "20", "0.1", "2.4"],
    ]


def test_the_first_half_is_checked_before_the_options_are_filled(tmp_path: Path) -> None:
    """With only build and train_step filled, both are graded, and the predictions are the next gap."""
    solved, unsolved = LESSON.solution.read_text(), LESSON.exercise.read_text()
    path = tmp_path / "half.py"
    path.write_text(solved[: solved.index(_CHOICES)] + unsolved[unsolved.index(_CHOICES) :])
    verdict = grade(LESSON, path)
    assert len(verdict.passed) == 3
    assert verdict.failure is not None
    assert verdict.failure.hint == "gap"
    assert "BLOCKS_WHOLE_AT_ONCE" in verdict.failure.what
    assert "choose_precision" not in verdict.failure.what


def test_a_file_of_an_earlier_course_names_its_missing_part(tmp_path: Path) -> None:
    """Exercises are never overwritten, so a file may lack the new part."""
    solved = LESSON.solution.read_text()
    path = tmp_path / "earlier.py"
    path.write_text(solved[: solved.index(_CHOICES)])
    assert find_gaps(path) == {}
    failure = grade(LESSON, path).failure
    assert failure is not None
    assert (failure.hint, failure.what) == ("missing-name", "your file has no `BLOCKS_WHOLE_AT_ONCE`")
