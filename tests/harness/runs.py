"""Small real runs for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.metrics.recorder import read_rows
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.settings.load import load_config
from paceline.settings.rules import check_config
from paceline.settings.schema import Config
from paceline.training.loop import train

QUICK = ["--num-samples=640", "--epochs=2", "--global-batch-size=64", "--log-frequency=1", "--track"]


def quick_config(*flags: str) -> Config:
    """A small `shapes-cnn`: 9 steps per epoch."""
    loaded = load_config("shapes-cnn", [*QUICK, *flags])
    check_config(loaded)
    return loaded.config


def train_in(world: World, folder: str, flags: tuple[str, ...], resume: bool = False) -> dict[str, Any]:
    """Train `quick_config(*flags)` in a folder; importable, so that ranks can run it."""
    path = Path(folder)
    RunFolder(path).create()
    return train(quick_config(*flags), world, RunPlace(path, path if resume else None)).to_json()


def step_losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]


def read_results(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results
