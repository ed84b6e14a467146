"""Saves for the tests of crash points: the state before, and the recorded operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.crash_points import Scenario
from harness.recorded_disk import Recorder
from harness.run_lives import RunLife


def saved(life: RunLife, recorder: Recorder | None = None, *, is_best: bool = False) -> None:
    report = life.save(is_best=is_best)
    if recorder is not None:
        recorder.mark("saved", report)


def first_save(run: Path, recorder: Recorder) -> None:
    life = RunLife(run)
    life.train(2)
    saved(life, recorder)
    life.close()


def two_steps(run: Path) -> None:
    life = RunLife(run)
    life.train(1)
    saved(life, is_best=True)
    life.train(1)
    saved(life)
    life.close()


def reported_two(recorder: Recorder) -> None:
    recorder.mark("saved", {"step": 2, "kept": [1, 2], "best": 1})


def save_and_prune(run: Path, recorder: Recorder) -> None:
    reported_two(recorder)
    life = RunLife(run)
    life.train(1)
    saved(life, recorder)  # 2 is dropped
    life.close()


def save_a_better_one(run: Path, recorder: Recorder) -> None:
    reported_two(recorder)
    life = RunLife(run)
    life.train(1)
    saved(life, recorder, is_best=True)  # 1 and 2 are dropped, best moves
    life.close()


def save_same_step_again(run: Path, recorder: Recorder) -> None:
    reported_two(recorder)
    life = RunLife(run)
    saved(life, recorder)
    life.close()


SAVES: dict[str, tuple[Scenario, Any]] = {
    "first": (first_save, None),
    "with a prune": (save_and_prune, two_steps),
    "better than before": (save_a_better_one, two_steps),
    "same step again": (save_same_step_again, two_steps),
}
