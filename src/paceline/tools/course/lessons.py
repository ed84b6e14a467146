"""The ten lessons: their names, and where their files lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, UserError

# In a wheel the lessons travel inside the package (see setup.py); in a checkout they lie where people read them.
_HOMES = (Path(__file__).parent / "lessons", Path(__file__).resolve().parents[4] / "course")


@dataclass(frozen=True)
class Lesson:
    number: int
    name: str  # as in folder names
    title: str
    grader: str  # the module in paceline.tools.course.graders
    suffix: str = ".py"  # of the exercise
    modules: tuple[str, ...] = ()  # what its ranks import besides torch, and what takes long to load

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
        """What the person's copy is called."""
        return f"{self.number:02}_{self.name.replace('-', '_')}{self.suffix}"


# Optimizers and wrappers load torch's compiler on their first call, also where nothing is compiled.
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
    """By its number, the way people write it: 3 or 03."""
    number = int(word) if re.fullmatch(r"\d{1,3}", word, re.ASCII) else 0
    for lesson in LESSONS:
        if lesson.number == number:
            return lesson
    raise UserError("there is no such lesson", got=word, allowed=f"1 to {len(LESSONS)}", hint="paceline course")
