"""Runs of every task with a user's commands: train, evaluate, predict, export, and the page."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import paceline as library
from harness.cli import Answer, environment, paceline

FLAGS = (
    *("--dataset", "csv", "--data-dir", "data", "--image-size", "16", "--augment", "none", "--no-flip", "--track"),
    *("--epochs", "3", "--global-batch-size", "16", "--processes", "2", "--base-lr", "1", "--output-dir", "run"),
)


def write_data(folder: Path, task: str) -> None:
    """Pictures of one colour. The labels name the bright channels, or the brightness of the first one."""
    drawn = random.Random(0)
    (folder / "data").mkdir()
    for part, count in (("train", 80), ("test", 30)):
        lines = ["path,label"]
        for number in range(count):
            colour = tuple(drawn.randrange(256) for _ in range(3))
            name = f"{part}-{number}.png"
            Image.fromarray(np.full((18, 18, 3), colour, dtype=np.uint8)).save(folder / "data" / name)
            bright = [label for label, value in zip(("red", "green", "blue"), colour, strict=True) if value > 127]
            lines.append(f"{name},{';'.join(bright) if task == 'multi-label' else colour[0] / 255}")
        (folder / "data" / f"{part}.csv").write_text("\n".join(lines) + "\n")


def run(*arguments: str, cwd: Path) -> Answer:
    answer = paceline(*arguments, cwd=cwd)
    assert answer.code == 0, answer.err
    return answer


def export_and_use(folder: Path) -> str:
    """The output of the code on the exported card."""
    run("export", "run", "--format", "torchscript", "--output", "out", cwd=folder)
    card = (folder / "out" / "card.md").read_text()
    Image.fromarray(np.full((18, 18, 3), (250, 10, 250), dtype=np.uint8)).save(folder / "out" / "picture.png")
    code = card.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder / "out",
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "run" / "checkpoints" / "best" / "state.json").read_text())
    return state


@pytest.mark.long
def test_several_labels_from_training_to_export(tmp_path: Path) -> None:
    write_data(tmp_path, "multi-label")
    trained = run("train", "shapes-cnn", *FLAGS, "--task", "multi-label", cwd=tmp_path)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["task"], results["best_by"]) == ("multi-label", "map")
    assert set(results["test"]["class_average_precision"]) == {"red", "green", "blue"}
    assert results["test_metrics"]["map"] == sum(results["test"]["class_average_precision"].values()) / 3
    assert f"map {results['test_metrics']['map']:.4f}" in trained.out + trained.err
    assert state_of(tmp_path)["record"]["task"] == "multi-label"
    assert state_of(tmp_path)["validation"]["merit"] == results["best_value"]

    evaluated = run("evaluate", "run", cwd=tmp_path)
    again = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    # One process evaluates other batches than two ranks, so the last bits of the outputs may differ.
    assert again["test_metrics"]["map"] == pytest.approx(results["test_metrics"]["map"], abs=0.01)
    assert "blue" in evaluated.out

    picture = str(tmp_path / "data" / "test-0.png")
    (prediction,) = library.load_run(tmp_path / "run").predict(picture)
    likely = [name for name, value in prediction.probabilities.items() if value > 0.5]
    assert sorted(prediction.labels) == sorted(likely)
    predicted = run("predict", "run", picture, cwd=tmp_path).out
    assert all(f"{name} {prediction.probabilities[name]:.1%}" in predicted for name in likely)
    assert export_and_use(tmp_path).startswith("[")
    assert "average precision" in (tmp_path / "out" / "card.md").read_text()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "mean average precision" in page
    assert "Average precision by label" in page


@pytest.mark.long
def test_a_regression_from_training_to_export(tmp_path: Path) -> None:
    write_data(tmp_path, "regression")
    trained = run("train", "shapes-cnn", *FLAGS, "--task", "regression", "--base-lr", "0.1", cwd=tmp_path)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["task"], results["best_by"], results["test_accuracy"]) == ("regression", "mae", None)
    assert results["test"]["class_mae"] == {"target": results["test_metrics"]["mae"]}
    assert results["best_value"] == -state_of(tmp_path)["best_merit"]
    assert "acc " not in trained.out + trained.err
    values = [row["mae"] for row in library.load_run(tmp_path / "run").metrics("val")]
    assert results["best_value"] == min(values)
    shown = f"mae {results['test_metrics']['mae']:.4g}"
    assert shown in run("status", "run", cwd=tmp_path).out
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["test_metric"], status["test_value"]) == ("mae", results["test_metrics"]["mae"])
    assert "objective task regression, loss mse, best by mae" in trained.out + trained.err

    run("evaluate", "run", cwd=tmp_path)
    again = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert again["test_metrics"]["mae"] == pytest.approx(results["test_metrics"]["mae"], rel=1e-4)
    picture = str(tmp_path / "data" / "test-0.png")
    (prediction,) = library.load_run(tmp_path / "run").predict(picture)
    assert (
        run("predict", "run", picture, cwd=tmp_path).out.strip()
        == f"{picture}: target {prediction.values['target']:.6g}"
    )
    assert export_and_use(tmp_path).startswith("{'target': ")
    assert "mean absolute error" in (tmp_path / "out" / "card.md").read_text()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "mean absolute error" in page
    assert "Accuracy by epoch" not in page


@pytest.mark.long
def test_the_best_checkpoint_is_the_best_by_the_chosen_metric(tmp_path: Path) -> None:
    flags = ("--num-samples", "640", "--epochs", "4", "--global-batch-size", "64", "--processes", "1", "--track")
    run("train", "shapes-cnn", *flags, "--best-by", "loss", "--output-dir", "run", cwd=tmp_path)
    opened = library.load_run(tmp_path / "run")
    losses = [row["loss"] for row in opened.metrics("val")]
    assert opened.results["best_epoch"] == losses.index(min(losses)) + 1
    assert opened.results["best_value"] == min(losses)
    assert state_of(tmp_path)["best_epoch"] == opened.results["best_epoch"]
    refused = paceline("train", "run/config.yaml", "--resume", "auto", "--epochs", "5", "--best-by", "f1", cwd=tmp_path)
    assert refused.code == 4
    assert "best_by" in refused.err
