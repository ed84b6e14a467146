"""Right answers that differ from the solution pass: a check must not require one way of writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.tools.course.grading import grade
from paceline.tools.course.lessons import find_lesson

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("rank_server")]
_SAVE = """    temporary = folder / "latest.tmp"
    with temporary.open("wb") as file:
        file.write(pack(step, state))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "latest.pt")
"""
_LOAD = """    path = folder / "latest.pt"
    if not path.exists():
        return None
"""
_NUMBERED = {
    _SAVE: """    temporary = folder / "new"
    torch.save({"step": step, **state}, temporary)
    with temporary.open("rb") as file:
        os.fsync(file)
    temporary.rename(folder / f"step-{step:05}.pt")
    for old in sorted(folder.glob("step-*.pt"))[:-2]:
        old.unlink()
""",
    _LOAD: """    found = sorted(folder.glob("step-*.pt"))
    if not found:
        return None
    path = found[-1]
""",
}
_LINKED = {
    _SAVE: """    path = folder / f"step-{step}.pt"
    path.write_bytes(pack(step, state))
    os.sync()
    (folder / "link").unlink(missing_ok=True)
    (folder / "link").symlink_to(path.name)
    os.replace(folder / "link", folder / "latest.pt")
"""
}
_IMPORTED_FSYNC = {
    "import os\n": "import os\nfrom os import fsync, replace\n",
    "os.fsync(": "fsync(",
    "os.replace(": "replace(",
}
ANSWERS = {
    "8 numbered files": ("8", _NUMBERED),
    "8 a link to the newest file": ("8", _LINKED),
    "8 functions imported by name": ("8", _IMPORTED_FSYNC),
    "6 counts as integers": (
        "6",
        {
            "    sums = torch.zeros(3, dtype=torch.float64)  # loss, right answers, samples\n": (
                "    counts, sums = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)\n"
            ),
            "sums[1] +=": "counts[0] +=",
            "sums[2] +=": "counts[1] +=",
            "    dist.all_reduce(sums)\n    loss, right, count = sums.tolist()\n": (
                "    dist.all_reduce(sums)\n    dist.all_reduce(counts)\n"
                "    loss, right, count = sums.item(), *counts.tolist()\n"
            ),
        },
    ),
    "2 a sum instead of a maximum": ("2", {", op=dist.ReduceOp.MAX": ""}),
    "9 a recursive tree": (
        "9",
        {
            "    while len(values) > 1:\n"
            "        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]\n"
            "    return values[0]\n": (
                "    half = len(values) // 2\n"
                "    return tree_sum(values[:half]) + tree_sum(values[half:]) if half else values[0]\n"
            )
        },
    ),
}


@pytest.mark.parametrize(("number", "changes"), ANSWERS.values(), ids=ANSWERS)
def test_another_right_answer_passes(number: str, changes: dict[str, str], tmp_path: Path) -> None:
    lesson = find_lesson(number)
    text = lesson.solution.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / lesson.file_name
    path.write_text(text)
    verdict = grade(lesson, path)
    assert verdict.failure is None, f"{verdict.failed}: {verdict.failure}"
