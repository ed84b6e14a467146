"""Every solution passes its check, every unsolved exercise fails, and every typical wrong answer gets its own hint.

The answers are found on disk: a new file in a lesson's wrong/ is tested by being there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.course.grading import grade
from paceline.course.lessons import LESSONS, Lesson

pytestmark = pytest.mark.course
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
    assert wanted is not None, "the file's head names the hint it must get"
    verdict = grade(lesson, path)
    assert verdict.failure is not None, "passed"
    assert verdict.failure.hint == wanted[1], f"{verdict.failed}: {verdict.failure.what}"


def test_there_are_wrong_answers_for_every_lesson() -> None:
    assert all(len(lesson.wrong_answers) >= 5 for lesson in LESSONS)
