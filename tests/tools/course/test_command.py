"""`paceline course` with the command, and the files of the lessons."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from harness.cli import paceline
from paceline.tools.course.lessons import LESSONS, Lesson, page_text

EVERY_LESSON = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)


def test_start_copies_the_exercises_and_keeps_filled_ones(tmp_path: Path) -> None:
    first = paceline("course", "start", cwd=tmp_path)
    assert (first.code, first.err) == (0, "")
    mine = tmp_path / "course-work" / "03_order_and_sharding.py"
    assert mine.read_text() == LESSONS[2].exercise.read_text()
    mine.write_text("# mine\n")
    (tmp_path / "course-work" / "01_shapes_and_batches.py").unlink()
    again = paceline("course", "start", cwd=tmp_path)
    assert "exercises copied to course-work: 1" in again.out
    assert "they exist already: 11" in again.out
    assert mine.read_text() == "# mine\n"


def test_a_check_ends_with_1_then_0_and_is_stored(tmp_path: Path) -> None:
    paceline("course", "start", cwd=tmp_path)
    unsolved = paceline("course", "check", "1", cwd=tmp_path)
    assert unsolved.code == 1
    assert "`flatten` still has a gap: line 8" in unsolved.out
    shutil.copy(LESSONS[0].solution, tmp_path / "course-work" / LESSONS[0].file_name)
    solved = paceline("course", "check", "1", cwd=tmp_path)
    assert (solved.code, solved.err) == (0, "")
    assert solved.out.splitlines()[-1] == "passed; next: paceline course show 2"
    listed = paceline("course", cwd=tmp_path).out.splitlines()
    assert re.fullmatch(r"  1  Shapes and batches +passed [\d-]+ [\d:]+", listed[0])
    assert listed[-1].startswith("next:   paceline course show 2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "13"), "1 to 12"),
        (("check", "x"), "1 to 12"),
        (("check",), "check N [FILE]"),
        (("check", "3"), "paceline course start"),
        (("check", "3", "."), "that is a folder"),
        (("check", "3", "noise.py"), "cannot be read as text"),
        (("check", "10", "noise.py"), "*.sbatch"),
        (("start", "noise.py"), "is a file"),
        (("begin",), "start"),
        (("show", "3", "--all"), "--answers"),
    ],
)
def test_a_mistake_is_reported_quickly(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "noise.py").write_bytes(b"\xff\xfe\x00")
    answer = paceline("course", *words, cwd=tmp_path)
    assert answer.code == 2
    assert said in answer.err


def test_show_hides_the_answers_by_default(tmp_path: Path) -> None:
    folded = paceline("course", "show", "3", cwd=tmp_path).out
    unfolded = paceline("course", "show", "3", "--answers", cwd=tmp_path).out
    assert "picture.svg" in folded
    assert "<details>" not in unfolded
    assert len(unfolded) > len(folded) + 200


@EVERY_LESSON
def test_a_lesson_is_complete(lesson: Lesson) -> None:
    text = lesson.page.read_text()
    assert text.startswith(f"# {lesson.number}. {lesson.title}\n")
    assert "(picture.svg)" in text
    assert text.count("<details>") == text.count("</details>") >= 3
    assert f"paceline course check {lesson.number}" in text
    assert 350 <= len(text.split()) <= 900, "a page"
    assert "<" not in re.sub(r"`[^`]*`|```.*?```", "", page_text(lesson, has_answers=True), flags=re.DOTALL)
    picture = ElementTree.parse(lesson.folder / "picture.svg").getroot()
    assert picture.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in (lesson.folder / "picture.svg").read_text()


def test_links_of_lessons_exist() -> None:
    home = LESSONS[0].folder.parent
    pages = [home / "README.md", *(lesson.page for lesson in LESSONS)]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)", page.read_text())]
    assert len(links) > 30
    missing = [f"{page}: {link}" for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []
