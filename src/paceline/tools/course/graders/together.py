"""Lesson 5: the order of a start, and a dry run."""

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
from paceline.tools.course.verdict import Failed, Item, cause_not_known

_PREPARING_S = 0.4  # long enough: a rank that does not wait reads too early
_BATCHES = 50


class _Job:
    """The functions that main() gets, which record how they are called."""

    def __init__(self, folder: str, rank: int, losses: tuple[float, ...] = (), fails: bool = False) -> None:
        self.file = Path(folder) / "data"
        self.rank = rank
        self.losses = losses or tuple(1 / (step + 1) for step in range(_BATCHES))
        self.fails = fails
        self.drawn = self.trained = 0
        self.is_early = False  # the data was read before it was there
        self.is_prepared_here = self.is_read_before_prepare = False

    def prepare(self, path: Path) -> None:
        self.is_prepared_here = True
        (path.parent / f"prepared-by-{self.rank}").touch()
        time.sleep(_PREPARING_S)
        path.touch()

    def read(self, path: Path) -> Iterator[int]:
        self.is_early = not path.exists()
        self.is_read_before_prepare = self.is_early and not self.is_prepared_here
        for batch in range(_BATCHES):
            self.drawn += 1
            yield batch

    def train_step(self, batch: int) -> float:
        if self.fails:
            raise RuntimeError("a bad batch")
        self.trained += 1
        return self.losses[batch]


def _join_completely() -> None:
    """A rank that leaves early must not break the connections of one that still joins: that would look like a hang."""
    original = dist.init_process_group

    def join(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        dist.barrier()

    dist.init_process_group = join


def _run_main(
    person: ModuleType, rank: int, world_size: int, folder: str, losses: tuple[float, ...], fails: bool
) -> dict[str, Any]:
    job = _Job(folder, rank, losses, fails)
    _join_completely()
    error, returned = "", None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            returned = person.main(job.file, job.prepare, job.read, job.train_step, 3)
        except (RuntimeError, ValueError) as caught:
            if not fails and not losses:
                raise
            error = type(caught).__name__
    return {
        "returned": returned,
        "error": error,
        "is_open": dist.is_initialized(),
        "is_early": job.is_early,
        "drawn": job.drawn,
        "trained": job.trained,
        "printed": printed.getvalue().strip(),
        "is_read_before_prepare": job.is_read_before_prepare,
    }


def _run(path: Path, losses: tuple[float, ...] = (), fails: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as folder:
        reports = on_ranks(path, 2, _run_main, folder, losses, fails, has_group=False)
        return reports, sorted(found.name for found in Path(folder).glob("prepared-by-*"))


def check_data(path: Path) -> None:
    reports, makers = _run(path)
    if not makers:
        raise Failed("never-prepared", "no rank called prepare", "Rank 0 calls prepare(path).")
    if len(makers) > 1:
        raise Failed(
            "prepared-more-than-once",
            "both ranks called prepare, at the same time, on the same file",
            "Two downloads into one file damage it. Only rank 0 prepares; the others wait.",
        )
    if makers != ["prepared-by-0"]:
        raise Failed(
            "wrong-rank-prepares", "rank 1 called prepare, not rank 0", "Rank 0 prepares: it exists in every run."
        )
    if reports[0]["is_read_before_prepare"]:
        raise Failed(
            "read-before-prepare", "rank 0 read the data before it called prepare", "Prepare first, then read."
        )
    if any(report["is_early"] for report in reports):
        early = [rank for rank, report in enumerate(reports) if report["is_early"]]
        raise Failed(
            "read-before-ready",
            f"rank {early[0]} read the data while rank 0 was still preparing it",
            "The other ranks do not wait. After `if rank == 0: prepare(path)` every rank, also rank 0, calls "
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
        raise Failed(
            "dry-run-too-short", f"asked for 3 steps, the ranks took {trained}", "Every rank takes `steps` steps."
        )
    losses = reports[0]["returned"]
    if not isinstance(losses, list) or [float(loss) for loss in losses] != [1.0, 1 / 2, 1 / 3]:
        raise cause_not_known(f"main returned {losses}", "the losses of the dry run, [1.0, 0.5, 0.333...], as a list.")
    not_a_number = (1.0, math.nan, 0.5)
    reports, _ = _run(path, losses=not_a_number)
    errors = [report["error"] for report in reports]
    if not all(errors):
        raise Failed(
            "nan-unnoticed",
            "the second loss was nan, and the dry run did not stop",
            "A dry run must find this: raise ValueError unless math.isfinite(loss). nan is not equal to itself.",
        )
    if errors != ["ValueError"] * 2:
        raise cause_not_known(f"the second loss was nan; the ranks raised {errors}", "ValueError on every rank.")


def check_printing(path: Path) -> None:
    reports, _ = _run(path)
    lines = [report["printed"].count("\n") + 1 if report["printed"] else 0 for report in reports]
    what = f"the ranks printed {lines} lines"
    if lines[0] and lines[1]:
        raise Failed("everyone-prints", what, "On 64 ranks that is 64 times the same line. Only rank 0 prints.")
    if lines[1]:
        raise Failed("wrong-rank-prints", what, "Rank 0 prints: it exists in every run.")
    if not lines[0]:
        raise Failed("no-rank-prints", what, "say(...) prints on rank 0, and main calls it.")


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
            "a step failed, and main() returned without an error",
            "`finally` cleans up and lets the error through; `except` hides it, and the job counts as a success.",
        )
    if any(report["is_open"] for report in reports):
        raise Failed(
            "cleanup-skipped",
            "when a step fails, the group stays open",
            "Code that must run at every end belongs in `finally`, not after the last line.",
        )


ITEMS = (
    Item("rank 0 prepares the data once, and the others wait", check_data),
    Item("the dry run takes its steps, and checks the losses", check_dry_run),
    Item("one rank prints", check_printing),
    Item("the group is closed after success and after an error", check_cleaning_up),
)
