"""Every solution passes its check, every unsolved exercise fails, and every typical wrong answer gets its own hint.

The answers are found on disk: a new file in a lesson's wrong/ is tested without registration.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from paceline.tools.course.grading import grade
from paceline.tools.course.lessons import LESSONS, Lesson
from paceline.tools.course.verdict import Item, find_gaps

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("rank_server")]
EVERY_LESSON = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
WRONG = [(lesson, path) for lesson in LESSONS for path in lesson.wrong_answers]


@pytest.fixture(autouse=True)
def _without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)


@EVERY_LESSON
def test_the_solution_passes(lesson: Lesson) -> None:
    verdict = grade(lesson, lesson.solution)
    assert verdict.failure is None, f"{verdict.failed}: {verdict.failure}"


@EVERY_LESSON
def test_the_unsolved_exercise_fails_for_its_gaps(lesson: Lesson) -> None:
    failure = grade(lesson, lesson.exercise).failure
    assert failure is not None
    assert failure.hint == "gap"


@pytest.mark.parametrize(("lesson", "path"), WRONG, ids=[f"{lesson.number}-{path.stem}" for lesson, path in WRONG])
def test_a_wrong_answer_gets_its_hint(lesson: Lesson, path: Path) -> None:
    wanted = re.search(r"^# hint: (\S+)$", path.read_text(), re.MULTILINE)
    assert wanted is not None, "the first lines of the file name the expected hint"
    verdict = grade(lesson, path)
    assert verdict.failure is not None, "passed"
    assert verdict.failure.hint == wanted[1], f"{verdict.failed}: {verdict.failure.what}"


@EVERY_LESSON
def test_every_gap_is_checked(lesson: Lesson) -> None:
    items: tuple[Item, ...] = importlib.import_module(f"paceline.tools.course.graders.{lesson.grader}").ITEMS
    gaps = set(find_gaps(lesson.exercise))
    assert gaps
    assert any(not item.uses for item in items) or gaps <= {name for item in items for name in item.uses}


def test_a_partly_filled_exercise_is_checked_up_to_the_first_gap(tmp_path: Path) -> None:
    half = LESSONS[0].exercise.read_text().replace("return ...  # TODO: one row", "return images.flatten(1)  # one row")
    path = tmp_path / "half.py"
    path.write_text(half)
    verdict = grade(LESSONS[0], path)
    assert verdict.passed[-1] == "a batch of any size becomes rows"
    assert verdict.failure is not None
    assert (verdict.failure.hint, verdict.failure.what) == ("gap", "`rank_batch_size` still has a gap: line 13")


def test_there_are_wrong_answers_for_every_lesson() -> None:
    assert all(len(lesson.wrong_answers) >= 5 for lesson in LESSONS)
