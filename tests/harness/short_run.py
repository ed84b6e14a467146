"""The run into which tests inject faults: two ranks, forty steps, a checkpoint every five, a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.cli import paceline
from harness.runs import read_results
from paceline.training.inject import read_ledger

FLAGS = [
    *("train", "shapes-cnn", "--num-samples=1480", "--global-batch-size=64", "--epochs=2", "--log-frequency=1"),
    *("--track", "--save-steps=5", "--processes=2", "--output-dir=run"),
]
STEPS = 40


def outcome(folder: Path) -> dict[str, object]:
    """The results of a finished run that a fault must not change."""
    results = read_results(folder)
    lines = (folder / "metrics.csv").read_text().splitlines()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        **{name: results[name] for name in ("weights_sha256", "test_loss", "test_accuracy", "steps")},
        "metrics": [line.rpartition(",")[0] for line in lines],
        "losses": [row["loss"] for row in steps if row["kind"] == "step"],
    }


def run_undisturbed(folder: Path, *flags: str) -> dict[str, object]:
    answer = paceline(*FLAGS, *flags, cwd=folder)
    assert answer.code == 0, answer
    return outcome(folder / "run")


def injected_faults(folder: Path) -> list[str]:
    return [str(row["what"]) for row in read_ledger(folder / "faults.jsonl")]


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def read_failures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
