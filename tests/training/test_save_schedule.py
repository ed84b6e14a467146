"""When a checkpoint is saved: --save-steps, --save-epochs, --keep-every-epochs and the end of the run."""

from __future__ import annotations

import itertools
from pathlib import Path

from harness.ranks import run_ranks
from harness.runs import train_in
from paceline.checkpoints.format import step_folders, step_of
from paceline.runs.epoch_clock import EpochClock
from paceline.settings.schema import RunConfig
from paceline.training.epoch import is_save_due


def steps_wanted(steps_per_epoch: int, last_step: int, run: RunConfig) -> set[int]:
    """The definition, by counting: each schedule has its own steps, and all of them are saved."""
    wanted = {last_step}
    if run.save_steps:
        wanted |= set(range(run.save_steps, last_step + 1, run.save_steps))
    for epochs in (run.save_epochs, run.keep_every_epochs):
        if epochs:
            wanted |= set(range(epochs * steps_per_epoch, last_step + 1, epochs * steps_per_epoch))
    return wanted


def test_every_schedule_saves_independently_of_the_others() -> None:
    """A save is due when any schedule requires it, inside an epoch and at its end."""
    grid = itertools.product((1, 2, 3, 5, 20), (1, 2, 7, 40, 41), (0, 1, 2, 3, 5, 10, 20, 40), (1, 2, 3, 99), (0, 1, 3))
    for steps_per_epoch, last_step, save_steps, save_epochs, keep_every_epochs in grid:
        run = RunConfig(save_steps=save_steps, save_epochs=save_epochs, keep_every_epochs=keep_every_epochs)
        due = {
            step for step in range(1, last_step + 1) if is_save_due(step, EpochClock(steps_per_epoch), last_step, run)
        }
        assert due == steps_wanted(steps_per_epoch, last_step, run), (steps_per_epoch, last_step, run)


def test_a_run_saves_if_steps_and_epochs_coincide(tmp_path: Path) -> None:
    """--save-steps equals the steps per epoch and --save-epochs is large: every one of these steps is saved."""
    flags = ("--save-steps=10", "--save-epochs=100", "--epochs=3", "--keep-last=9", "--train-split=1.0")
    run_ranks(1, train_in, str(tmp_path), flags)
    assert [step_of(path) for path in step_folders(tmp_path / "checkpoints")] == [30, 20, 10]
