"""Mistakes in modern recipes: one screen each, in the process that was started, before a run folder exists.

Layers that a model does not have are in tests/training/test_refused_layers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline
from harness.task_data import write_pictures
from paceline.cli.main import main

SHORT = ("train", "shapes-cnn", "--num-samples", "640", "--processes", "1", "--epochs", "3", "--output-dir", "run")
TABLE = ("--dataset", "csv", "--data-dir", "data", "--task", "regression", "--global-batch-size", "4")
USER, DATA = 2, 3
CASES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "soft targets and the focal loss": (("--loss", "focal", "--mixup-alpha", "0.2"), USER, "--mixup-alpha"),
    "mixup and regression": ((*TABLE, "--mixup-alpha", "0.2"), USER, "--mixup-alpha"),
    "freezing nothing": (("--freeze", "layer9"), USER, "--freeze"),
    "freezing everything": (("--freeze", "*"), USER, "--freeze"),
    "class weights of another length": (("--class-weights", "1", "2", "3"), USER, "--class-weights"),
    "a missing picture": ((*TABLE, "--data-dir", "gone"), DATA, "gone/train.csv, line 2"),
    "a missing label": ((*TABLE, "--data-dir", "blank"), DATA, "blank/train.csv, line 3"),
    "a label above float32": ((*TABLE, "--data-dir", "huge"), DATA, "huge/train.csv, line 2"),
    "sizes after the end": (
        ("--augment", "resized-crop", "--resolution-schedule", "0:16,9:32"),
        USER,
        "--resolution-schedule",
    ),
    "a temperature without effect": (
        ("--teacher", "absent", "--distill", "hard", "--distill-temperature", "2"),
        USER,
        "--distill-temperature",
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    labels = {"data": ("1.5", "2"), "gone": ("1.5", "2"), "blank": ("1.5", ""), "huge": ("1e39", "2")}
    for name, (first, second) in labels.items():
        (folder / name).mkdir()
        rows = {f"{part}.csv": [(f"{part}-a.png", first), (f"{part}-b.png", second)] for part in ("train", "test")}
        write_pictures(folder / name, rows)
    (folder / "gone" / "train-a.png").unlink()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_one_screen_and_no_run(
    case: str, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, code, where = CASES[case]
    monkeypatch.chdir(data)
    assert main([*SHORT, *flags]) == code
    screen = capsys.readouterr().err
    assert screen.count("error:") == 1
    assert where in screen
    assert not (data / "run").exists()


@pytest.mark.long
def test_a_teacher_with_other_classes_is_refused_before_the_ranks_start(tmp_path: Path) -> None:
    small = ("--num-samples", "200", "--global-batch-size", "32", "--epochs", "1", "--processes", "1", "--track")
    made = ("--dataset", "synthetic", "--input-size", "3x32x32", "--num-classes", "4")
    trained = paceline("train", "shapes-cnn", *small, *made, "--output-dir", "teacher", cwd=tmp_path)
    assert trained.code == 0, trained.err
    answer = paceline("train", "shapes-cnn", *small, "--teacher", "teacher", "--output-dir", "run", cwd=tmp_path)
    assert answer.code == USER
    assert answer.err.count("error:") == 1
    assert "--teacher" in answer.err
    assert not (tmp_path / "run").exists()


def test_a_list_of_values_for_a_flag_names_the_form_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "shapes-cnn", "--base-lr", "0.1,0.4"]) == USER
    assert "paceline sweep shapes-cnn base_lr=0.1,0.4" in capsys.readouterr().err
