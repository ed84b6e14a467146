"""The page of a lesson for a terminal; answers are hidden by default."""

from __future__ import annotations

import re

from paceline.tools.course.lessons import Lesson

_FOLDED = re.compile(r"<details>\s*<summary>(.*?)</summary>\s*(.*?)\s*</details>", re.DOTALL)
_PICTURE = re.compile(r"!\[(.*?)\]\((.*?)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)")


def page_text(lesson: Lesson, *, has_answers: bool) -> str:
    """Markdown without HTML."""
    text = lesson.page.read_text(encoding="utf-8")
    text = _FOLDED.sub(lambda match: _unfold(match[1], match[2], has_answers), text)
    text = _PICTURE.sub(lambda match: f"*Picture ({match[1]}):* {lesson.folder / match[2]}", text)
    return _LINK.sub(lambda match: match[1] if match[1].startswith("`") else f"{match[1]} ({match[2]})", text)


def _unfold(question: str, answer: str, has_answers: bool) -> str:
    return f"- **{question}**\n\n{answer}\n" if has_answers else f"- **{question}**\n"
