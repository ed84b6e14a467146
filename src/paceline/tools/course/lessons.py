"""The twelve lessons: their names, and where their files are."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from paceline.errors import PacelineError, UserError
from paceline.settings.small_files import read_json_object

# In a wheel the lessons are inside the package (see setup.py); in a checkout they are in course/.
_HOMES = (Path(__file__).parent / "lessons", Path(__file__).resolve().parents[4] / "course")
DEFAULT = Path("course-work")
_PROGRESS = "progress.json"
_FOLDED = re.compile(r"<details>\s*<summary>(.*?)</summary>\s*(.*?)\s*</details>", re.DOTALL)
_CODE = re.compile(r"<code>(.*?)</code>")
_PICTURE = re.compile(r"!\[(.*?)\]\((.*?)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)")


@dataclass(frozen=True)
class Lesson:
    number: int
    name: str  # as in folder names
    title: str
    grader: str  # the module in paceline.tools.course.graders
    suffix: str = ".py"  # of the exercise
    modules: tuple[str, ...] = ()  # slow imports of its ranks besides torch

    @property
    def folder(self) -> Path:
        return find_home() / f"{self.number:02}-{self.name}"

    @property
    def page(self) -> Path:
        return self.folder / "README.md"

    @property
    def exercise(self) -> Path:
        return self.folder / f"exercise{self.suffix}"

    @property
    def solution(self) -> Path:
        return self.folder / f"solution{self.suffix}"

    @property
    def wrong_answers(self) -> list[Path]:
        return sorted((self.folder / "wrong").glob(f"*{self.suffix}"))

    @property
    def file_name(self) -> str:
        """The name of the student's copy."""
        return f"{self.number:02}_{self.name.replace('-', '_')}{self.suffix}"


# Optimizers and wrappers load torch's compiler on their first call, even if nothing is compiled.
_FOR_OPTIMIZERS = ("torch._dynamo",)
_FOR_WRAPPING = ("torch.distributed.fsdp", *_FOR_OPTIMIZERS)
LESSONS = (
    Lesson(1, "shapes-and-batches", "Shapes and batches", "shapes"),
    Lesson(2, "process-groups-and-ranks", "Process groups and ranks", "groups"),
    Lesson(3, "order-and-sharding", "Order and sharding", "order"),
    Lesson(4, "wrapping", "DDP and FSDP: wrapping a model", "wrapping", modules=_FOR_WRAPPING),
    Lesson(5, "putting-it-together", "Putting it together, and the dry run", "together"),
    Lesson(6, "loop-and-evaluation", "The loop and the evaluation", "loop", modules=_FOR_OPTIMIZERS),
    Lesson(7, "benchmarks-and-plots", "Benchmarks, and reading the plots", "benchmarks"),
    Lesson(8, "checkpoints-and-crashes", "Checkpoints and crashes", "crashes"),
    Lesson(9, "exactness", "Exactness", "exactness"),
    Lesson(10, "slurm-on-one-machine", "Slurm on one machine", "slurm_script", ".sbatch"),
    Lesson(11, "augmentation", "Augmentation, sample by sample", "augmentation"),
    Lesson(12, "fine-tuning", "Fine-tuning", "finetuning", modules=_FOR_OPTIMIZERS),
)


def find_home() -> Path:
    for home in _HOMES:
        if (home / "01-shapes-and-batches").is_dir():
            return home
    raise PacelineError(
        "the lessons are not part of this installation",
        where=str(_HOMES[0]),
        hint="pip install paceline from a wheel or a checkout, not from the folder src alone",
    )


def find_lesson(word: str) -> Lesson:
    """Find a lesson by its number, written as 3 or 03."""
    number = int(word) if re.fullmatch(r"\d{1,3}", word, re.ASCII) else 0
    for lesson in LESSONS:
        if lesson.number == number:
            return lesson
    raise UserError("there is no such lesson", got=word, allowed=f"1 to {len(LESSONS)}", hint="paceline course")


# A student's folder for the course: copies of the exercises, and the lessons that were passed.


def start(folder: Path) -> tuple[list[Path], list[Path]]:
    """Copy the exercises. Returns the new files, and those that exist already and are not changed."""
    if folder.exists() and not folder.is_dir():
        raise UserError("the folder for the course is a file", got=str(folder), hint="paceline course start ANOTHER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new: list[Path] = []
        kept: list[Path] = []
        for lesson in LESSONS:
            target = folder / lesson.file_name
            (kept if target.exists() else new).append(target)
            if not target.exists():
                shutil.copyfile(lesson.exercise, target)
    except OSError as error:
        raise UserError("the exercises cannot be written there", where=str(folder), got=error.strerror) from error
    return new, kept


def work_folder() -> Path:
    """The folder with the copies: the current one, or the default folder of `start`."""
    if any((Path() / lesson.file_name).is_file() for lesson in LESSONS):
        return Path()
    return DEFAULT


def find_file(lesson: Lesson, given: str | None) -> Path:
    """The student's file for a lesson, checked to be a readable text file."""
    path = Path(given) if given else work_folder() / lesson.file_name
    if not path.is_file():
        hint = "paceline course start copies the exercises into course-work/" if given is None else None
        what = "that is a folder" if path.is_dir() else "there is no such file"
        raise UserError(f"lesson {lesson.number}: {what}", where=str(path), hint=hint)
    if path.suffix != lesson.suffix:
        raise UserError(
            f"lesson {lesson.number} is checked with another kind of file", got=path.name, allowed=f"*{lesson.suffix}"
        )
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("this file cannot be read as text", where=str(path), got=error) from error
    return path


def read_passed() -> dict[int, str]:
    """The passed lessons, each with its time."""
    try:
        content = read_json_object(work_folder() / _PROGRESS)
        return {int(number): str(when) for number, when in content["passed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def note_passed(lesson: Lesson, path: Path) -> None:
    """Record a passed lesson. Only the copy in the course folder counts, not other files that are checked."""
    folder = work_folder()
    if path.resolve() != (folder / lesson.file_name).resolve():
        return
    passed = {**read_passed(), lesson.number: datetime.now().isoformat(" ", "minutes")}
    text = json.dumps({"passed": {str(number): passed[number] for number in sorted(passed)}}, indent=2)
    temporary = folder / f".{_PROGRESS}"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(folder / _PROGRESS)


# The page of a lesson for a terminal; answers are hidden by default.


def page_text(lesson: Lesson, *, has_answers: bool) -> str:
    """Markdown without HTML."""
    text = lesson.page.read_text(encoding="utf-8")
    text = _FOLDED.sub(lambda match: _unfold(match[1], match[2], has_answers), text)
    text = _PICTURE.sub(lambda match: f"*Picture ({match[1]}):* {lesson.folder / match[2]}", text)
    return _LINK.sub(lambda match: match[1] if match[1].startswith("`") else f"{match[1]} ({match[2]})", text)


def _unfold(question: str, answer: str, has_answers: bool) -> str:
    question = _CODE.sub(r"`\1`", question)
    return f"- **{question}**\n\n{answer}\n" if has_answers else f"- **{question}**\n"
