"""Lesson 5: the order of a start, and a dry run of it."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item

_PREPARING_S = 0.4  # long enough that a rank that does not wait finds nothing
_BATCHES = 50


class _Scene:
    """What main() is given to work with, and a note of everything that happens to it."""

    def __init__(self, folder: str, rank: int, losses: tuple[float, ...] = (), fails: bool = False) -> None:
        self.file = Path(folder) / "data"
        self.rank = rank
        self.losses = losses or tuple(1 / (step + 1) for step in range(_BATCHES))
        self.fails = fails
        self.drawn = self.trained = 0
        self.is_early = False

    def prepare(self, path: Path) -> None:
        (path.parent / f"prepared-by-{self.rank}").touch()
        time.sleep(_PREPARING_S)
        path.touch()

    def read(self, path: Path) -> Iterator[int]:
        self.is_early = not path.exists()
        for batch in range(_BATCHES):
            self.drawn += 1
            yield batch

    def train_step(self, batch: int) -> float:
        if self.fails:
            raise RuntimeError("a bad batch")
        self.trained += 1
        return self.losses[batch]


def _play(
    person: ModuleType, rank: int, world_size: int, folder: str, losses: tuple[float, ...], fails: bool
) -> dict[str, Any]:
    scene = _Scene(folder, rank, losses, fails)
    error, returned = "", None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            returned = person.main(scene.file, scene.prepare, scene.read, scene.train_step, 3)
        except (RuntimeError, ValueError) as caught:
            if not fails and not losses:
                raise
            error = type(caught).__name__
    return {
        "returned": returned,
        "error": error,
        "is_open": dist.is_initialized(),
        "is_early": scene.is_early,
        "drawn": scene.drawn,
        "trained": scene.trained,
        "said": said.getvalue().strip(),
    }


def _run(path: Path, losses: tuple[float, ...] = (), fails: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as folder:
        reports = on_ranks(path, 2, _play, folder, losses, fails, has_group=False)
        return reports, sorted(found.name for found in Path(folder).glob("prepared-by-*"))


def check_data(path: Path) -> None:
    reports, makers = _run(path)
    if not makers:
        raise Failed("nobody-prepared", "prepare was never called", "Rank 0 calls prepare(path).")
    if len(makers) > 1:
        raise Failed(
            "prepared-more-than-once",
            "both ranks called prepare, at the same time, on the same file",
            "Two downloads into one file break each other. Only rank 0 prepares; the others wait.",
        )
    if makers != ["prepared-by-0"]:
        raise Failed("wrong-rank-prepares", f"{makers[0]} is not rank 0", "By custom it is rank 0.")
    if any(report["is_early"] for report in reports):
        early = [rank for rank, report in enumerate(reports) if report["is_early"]]
        raise Failed(
            "read-before-ready",
            f"rank {early[0]} went to read the data while rank 0 was still making it",
            "Nothing holds the others back: after `if rank == 0: prepare(path)` every rank, rank 0 too, calls "
            "dist.barrier().",
        )


def check_dry_run(path: Path) -> None:
    reports, _ = _run(path)
    trained = [report["trained"] for report in reports]
    if max(trained) > 3:
        raise Failed(
            "dry-run-too-long",
            f"asked for 3 steps, the ranks took {trained}",
            "A dry run stops after `steps` batches: itertools.islice(batches, steps).",
        )
    if min(trained) < 3:
        raise Failed("dry-run-too-short", f"asked for 3 steps, the ranks took {trained}", "All of them, on every rank.")
    losses = reports[0]["returned"]
    if not isinstance(losses, list) or [float(loss) for loss in losses] != [1.0, 1 / 2, 1 / 3]:
        raise Failed("losses-not-returned", f"main returned {losses}", "main returns the losses of the dry run.")
    not_a_number = (1.0, math.nan, 0.5)
    reports, _ = _run(path, losses=not_a_number)
    if any(report["error"] != "ValueError" for report in reports):
        raise Failed(
            "nan-unnoticed",
            "the second loss was nan, and the dry run went on",
            "Finding this out is what it is for: raise ValueError unless math.isfinite(loss).",
        )


def check_talking(path: Path) -> None:
    reports, _ = _run(path)
    lines = [report["said"].count("\n") + 1 if report["said"] else 0 for report in reports]
    if lines[1]:
        raise Failed(
            "everyone-prints",
            f"the ranks printed {lines} lines",
            "On 64 ranks that is 64 times the same line. Only rank 0 speaks.",
        )
    if not lines[0]:
        raise Failed("nobody-prints", "rank 0 printed nothing", "say(...) prints on rank 0.")


def check_cleaning_up(path: Path) -> None:
    reports, _ = _run(path)
    if any(report["is_open"] for report in reports):
        raise Failed(
            "group-left-open", "after main() the group is still open", "dist.destroy_process_group() at the end."
        )
    reports, _ = _run(path, fails=True)
    if any(report["error"] != "RuntimeError" for report in reports):
        raise Failed(
            "error-swallowed",
            "a step failed, and main() ended as if nothing had happened",
            "`finally` cleans up and lets the error through; `except` hides it, and the job counts as a success.",
        )
    if any(report["is_open"] for report in reports):
        raise Failed(
            "cleanup-skipped",
            "when a step fails, the group stays open",
            "What must happen at every end belongs into `finally`, not behind the last line.",
        )


ITEMS = (
    Item("rank 0 makes the data once, and the others wait", check_data),
    Item("the dry run takes its steps, and looks at them", check_dry_run),
    Item("one rank speaks", check_talking),
    Item("the group is closed after a good end and after a bad one", check_cleaning_up),
)
