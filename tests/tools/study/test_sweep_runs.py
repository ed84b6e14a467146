"""A sweep of real runs: after a kill it continues, and its cells have the bits of plain runs."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.processes import seconds_until_empty, started
from harness.runs import read_results
from paceline.tools.study.sweep import read_sweep

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
FLAGS = ("--num-samples=900", "--global-batch-size=16", "--epochs=4", "--save-steps=5", "--omp-num-threads=1")
SWEEP = ("sweep", "shapes-cnn", "base_lr=0.01,0.05", *FLAGS, "--processes=1", "--no-async-save", "--track")


def test_a_killed_sweep_continues(tmp_path: Path) -> None:
    with started(*SWEEP, cwd=tmp_path) as run:
        run.wait_for("[1/2] base_lr-0.05", 200)
        folder = tmp_path / "sweeps" / "shapes-cnn"
        first, second = (folder / "cells" / cell.name for cell in read_sweep(folder).cells())
        while not list(second.glob("checkpoints/step-*")):
            assert run.process.poll() is None, run.err
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait()
    seconds_until_empty(tmp_path, 60)  # the cell ends with the sweep, and saves
    assert not (second / "results.json").exists()
    done = (first / "results.json").stat().st_mtime_ns
    answer = paceline(*SWEEP, cwd=tmp_path, timeout_s=200)
    assert answer.code == 0, answer
    assert "1 done already" in answer.out
    assert (first / "results.json").stat().st_mtime_ns == done
    plain = paceline(
        *("train", "shapes-cnn", "--base-lr=0.05", *FLAGS, "--processes=1", "--track", "--output-dir=plain"),
        cwd=tmp_path,
        timeout_s=200,
    )
    assert plain.code == 0, plain
    assert read_results(second)["weights_sha256"] == read_results(tmp_path / "plain")["weights_sha256"]
    with (folder / "sweep.csv").open() as file:
        assert [row["base_lr"] for row in csv.DictReader(file)] == ["0.01", "0.05"]
    assert (folder / "report.html").exists()
    again = paceline(*SWEEP, cwd=tmp_path)  # no work is left
    assert (again.code, "2 done already" in again.out) == (0, True)
