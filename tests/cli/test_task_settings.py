"""Settings of losses, tasks, metrics, sampling and teachers that exclude each other: one screen before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline
from harness.ranks import make_world
from paceline.errors import EXIT_USER, UserError
from paceline.launch.request import read_request
from paceline.settings.schema import Config
from paceline.settings.tasks import best_metric, loss_name
from paceline.training.components import build_components

OWN = "harness.task_data"
SEVERAL = ("--dataset", f"{OWN}:several_labels", "--task", "multi-label")
NUMBERS = ("--dataset", f"{OWN}:numbers", "--task", "regression")


@pytest.mark.parametrize(
    ("flags", "what", "where"),
    [
        (("--loss", "focal", "--mixup-alpha", "0.2"), "focal loss needs hard", "--mixup-alpha"),
        (("--loss", "hinge"), "no loss 'hinge'", "--loss"),
        (("--loss", "mse"), "no loss 'mse'", "--loss"),
        ((*SEVERAL, "--loss", "cross-entropy"), "no loss 'cross-entropy'", "--loss"),
        ((*NUMBERS, "--mixup-alpha", "0.2"), "a regression has none", "--mixup-alpha"),
        ((*NUMBERS, "--cutmix-alpha", "1"), "a regression has none", "--cutmix-alpha"),
        ((*NUMBERS, "--class-weights", "balanced"), "class_weights is a part of", "--class-weights"),
        ((*NUMBERS, "--label-smoothing", "0.1"), "label_smoothing is a part of", "--label-smoothing"),
        ((*SEVERAL, "--label-smoothing", "0.1"), "single-label targets", "--label-smoothing"),
        (("--bce-threshold", "0.2"), "bce_threshold is a part of bce", "--bce-threshold"),
        (("--focal-gamma", "1"), "focal_gamma is a part of focal", "--focal-gamma"),
        (("--class-weights", "1", "x"), "no class weights", "--class-weights"),
        (("--class-weights", "1", "-1"), "no class weights", "--class-weights"),
        (("--class-weights", "0", "0"), "no class weights", "--class-weights"),
        (("--best-by", "mae"), "no such metric", "--best-by"),
        ((*NUMBERS, "--best-by", "accuracy"), "no such metric", "--best-by"),
        ((*SEVERAL, "--best-by", "top5"), "no such metric", "--best-by"),
        (("--best-by", "max:other"), "no such metric", "--best-by"),
        (("--task", "regression"), "one class per sample", "task"),
        ((*NUMBERS, "--sampling", "balanced"), "one class per sample", "--sampling"),
        (("--teacher", "nowhere"), "no such teacher", "--teacher"),
        (("--distill", "hard"), "needs a teacher", "--distill"),
        (("--distill-weight", "0.3"), "needs a teacher", "--distill-weight"),
    ],
)
def test_incompatible_task_settings_are_refused(flags: tuple[str, ...], what: str, where: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        read_request("shapes-cnn", list(flags))
    assert refused.value.exit_code == EXIT_USER
    assert where in str(refused.value.where)


def config_of(*flags: str) -> Config:
    return read_request("shapes-cnn", ["--num-samples", "640", "--processes", "1", *flags]).config


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--class-weights", "1", "2", "3"), "number of class weights"),
        (("--sampling", "weighted"), "needs a weight of each training sample"),
        (
            ("--dataset", "synthetic", "--input-size", "3x8x8", "--num-classes", "5", "--best-by", "top5"),
            "no metric top5",
        ),
        (("--epoch-samples", "100"), "larger than the training set"),
    ],
)
def test_settings_that_the_data_excludes_are_refused_before_the_first_step(flags: tuple[str, ...], what: str) -> None:
    with pytest.raises(UserError, match=what):
        build_components(config_of(*flags), make_world(0, 1))


def test_a_screen_of_the_command(tmp_path: Path) -> None:
    answer = paceline("train", "shapes-cnn", "--loss", "focal", "--cutmix-alpha", "1", cwd=tmp_path)
    assert answer.code == EXIT_USER
    assert "error: cutmix gives soft targets" in answer.err
    assert "try:" in answer.err
    assert not (tmp_path / "runs").exists()


def test_class_weights_of_a_file_become_numbers(tmp_path: Path) -> None:
    file = tmp_path / "weights.txt"
    file.write_text("1, 2.5\n0.125\n3 4 5 6 7 8 9\n")
    from_file, from_flags = (
        config_of("--class-weights", *texts)
        for texts in ((str(file),), ("1", "2.50", "0.125", "3", "4", "5", "6", "7", "8", "9"))
    )
    assert from_file.objective == from_flags.objective
    assert from_file.objective.class_weights[:3] == ("1", "2.5", "0.125")
    assert config_of("--class-weights", "1,2.5,3").objective.class_weights == ("1", "2.5", "3")
    assert config_of("--class-weights", "balanced").objective.class_weights == ("balanced",)


def test_the_task_sets_the_loss_and_the_best_metric() -> None:
    assert (loss_name(config_of()), best_metric(config_of())) == ("cross-entropy", ("accuracy", "max"))
    several, numbers = config_of(*SEVERAL), config_of(*NUMBERS)
    assert (loss_name(several), best_metric(several)) == ("bce", ("map", "max"))
    assert (loss_name(numbers), best_metric(numbers)) == ("mse", ("mae", "min"))
    assert best_metric(config_of("--best-by", "loss")) == ("loss", "min")
