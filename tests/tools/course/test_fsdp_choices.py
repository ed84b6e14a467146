"""Lesson 4's choices under FSDP: predictions, measured numbers, and files that are only partly filled."""

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


def test_wrong_predictions_pass_and_are_shown_beside_what_the_ranks_did(tmp_path: Path) -> None:
    """A prediction is not graded. The table has one row per choice, in a terminal of 80 columns."""
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
    # Bytes of one rank: weights gathered once or twice, gradients always in float32. Half of each comes from the other.
    assert rows == [
        ["model", "float32", "kept", "1", "2.4", "2.4"],
        ["blocks", "float32", "dropped", "9", "0.8", "3.4"],
        ["blocks", "bfloat16", "dropped", "9", "0.4", "2.3"],
        ["blocks", "bfloat16", "kept", "5", "1.2", "1.8"],
        ["layers", "bfloat16", "dropped", "20", "0.1", "2.4"],
    ]


def test_the_first_half_is_checked_before_the_choices_are_begun(tmp_path: Path) -> None:
    """Who has only filled build and train_step sees both graded, then the predictions as the next gap."""
    solved, unsolved = LESSON.solution.read_text(), LESSON.exercise.read_text()
    path = tmp_path / "half.py"
    path.write_text(solved[: solved.index(_CHOICES)] + unsolved[unsolved.index(_CHOICES) :])
    verdict = grade(LESSON, path)
    assert len(verdict.passed) == 3
    assert verdict.failure is not None
    assert verdict.failure.hint == "gap"
    assert "BLOCKS_WHOLE_AT_ONCE" in verdict.failure.what
    assert "choose_precision" not in verdict.failure.what


def test_a_file_of_an_earlier_course_is_told_what_it_lacks(tmp_path: Path) -> None:
    """Exercises are never overwritten, so a file without the new part may be there."""
    solved = LESSON.solution.read_text()
    path = tmp_path / "earlier.py"
    path.write_text(solved[: solved.index(_CHOICES)])
    assert find_gaps(path) == {}
    failure = grade(LESSON, path).failure
    assert failure is not None
    assert (failure.hint, failure.what) == ("missing-name", "your file has no `BLOCKS_WHOLE_AT_ONCE`")
