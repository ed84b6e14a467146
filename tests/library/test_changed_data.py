"""Data of a function that changes between two calls in one process is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.errors import DataError

CODE = """
import numpy as np

def load(data_dir):
    x = np.load(f"{data_dir}/x.npy")
    part = x, np.arange(len(x)) % 2
    return part, part
"""


def test_plan_and_evaluate_read_changed_data(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    data = f"{tmp_path / 'own.py'}:load"
    samples = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    flags: dict[str, Any] = {
        "model": "mlp",
        "data": data,
        "data_dir": str(tmp_path),
        "global_batch_size": 16,
        "train_split": 1.0,
    }
    np.save(tmp_path / "x.npy", samples[:32])
    assert paceline.plan(**flags, epochs=1, processes=1).total_steps == 2
    np.save(tmp_path / "x.npy", samples)
    assert paceline.plan(**flags, epochs=1, processes=1).total_steps == 4

    run = paceline.train(
        **flags, epochs=1, processes=1, augment="none", track=(), quiet=True, output_dir=tmp_path / "run"
    )
    assert run.evaluate().accuracy == run.results["test_accuracy"]
    np.save(tmp_path / "x.npy", samples + 1)
    with pytest.raises(DataError):
        run.evaluate()
