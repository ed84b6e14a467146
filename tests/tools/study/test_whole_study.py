"""A study of real runs on this machine: its numbers compared with another clock, its page in a real browser."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from harness.cli import paceline
from harness.processes import parent_of, processes_in, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STUDY = [
    *("study", "shapes-cnn", "--world-sizes=1,2", "--strategies=ddp,fsdp", "--repeats=1", "--output-dir=study"),
    *("--num-samples=2600", "--track", "--log-frequency=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interrupted study with one killed cell: the same command continues, and --retry repeats the cell."""
    folder = tmp_path_factory.mktemp("study")
    with started(*STUDY, cwd=folder) as run:
        run.wait_for("[1/4] ddp-1-r1 ", 120)
        run.wait_for("[1/4] ddp-2-r1 ", 120)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.err
        assert "the same command continues" in run.err
    done = (folder / "study" / "cells" / "ddp-1-r1" / "results.json").stat().st_mtime_ns
    with started(*STUDY, cwd=folder) as run:
        assert "1 done already" in run.wait_for("study ")
        run.wait_for("[1/4] ddp-2-r1           running", 120)
        _kill_the_cell(folder, run.process.pid)
        assert "failed" in run.wait_for("[2/4] ddp-2-r1 ", 120)
        run.wait_for("next      the same command with --retry", 400)
        assert run.wait() == 1, run.err
    answer = paceline(*STUDY, "--retry", cwd=folder)
    assert answer.code == 0, answer
    assert "3 done already" in answer.out
    assert (folder / "study" / "cells" / "ddp-1-r1" / "results.json").stat().st_mtime_ns == done
    return folder / "study"


def _kill_the_cell(folder: Path, study_pid: int) -> None:
    """Like the kernel's OOM killer: kill the study's only child without a message. Its ranks die with it."""
    deadline = time.monotonic() + 60
    children: list[int] = []
    while not children:  # the line about the start is printed slightly before it
        assert time.monotonic() < deadline, "the study starts no cell"
        children = [pid for pid in processes_in(folder) if parent_of(pid) == study_pid]
    assert len(children) == 1
    os.kill(children[0], signal.SIGKILL)


def read_results(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_cell_is_there_once_with_the_same_precision_and_batch(folder: Path) -> None:
    rows = read_results(folder)
    assert [(row["method"], row["gpus"]) for row in rows] == list(itertools.product(("ddp", "fsdp"), "12"))
    assert {row["precision"] for row in rows} == {"float32"}
    assert {row["global_batch_size"] for row in rows} == {"256"}
    assert {row["attempts"] for row in rows} == {"1"}


def test_the_phases_add_up_to_the_step(folder: Path) -> None:
    phases = ("data", "forward", "backward", "communication", "update", "other")
    for row in read_results(folder):
        parts = {phase: float(row[f"{phase}_ms"]) for phase in phases}
        # The rest is the time outside of the other phases. It must be small: every large part has a name.
        assert sum(parts.values()) == pytest.approx(float(row["step_ms_mean"]), rel=0.02)
        assert -0.02 < parts["other"] / float(row["step_ms_mean"]) < 0.1
        assert (parts["communication"] > 0) == (row["gpus"] == "2")


def test_times_agree_with_an_independent_clock(folder: Path) -> None:
    """The wall clock stamps every row of a run. The rows around an epoch bound its time from both sides."""
    for row in read_results(folder):
        path = folder / "cells" / f"{row['method']}-{row['gpus']}-r{row['repeat']}" / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        at_least, at_most = [], []
        for before, after in itertools.pairwise(n for n, r in enumerate(rows) if is_train_epoch(r)):
            steps = [r["time"] for r in rows[before:after] if r["kind"] == "step"]
            assert len(steps) == int(row["steps_per_epoch"])
            at_least.append(steps[-1] - steps[0])  # all steps of the epoch except the first
            at_most.append(rows[after]["time"] - rows[before + 1]["time"])  # from validation to the epoch's row
        # The study leaves the first epoch out, which also warms up. So does the pairing above.
        assert statistics.fmean(at_least) < float(row["time"]) < statistics.fmean(at_most)


def is_train_epoch(row: dict[str, Any]) -> bool:
    return (row["kind"], row.get("phase")) == ("epoch", "train")


def test_plots_and_page_exist(folder: Path) -> None:
    names = {"plot_time_per_epoch", "plot_throughput", "plot_efficiency", "plot_step_breakdown", "plot_step_shares"}
    names |= {"plot_accuracy", "plot_val_loss", "plot_peak_mem_per_gpu"}
    assert {path.name for path in (folder / "plots").iterdir()} == {f"{n}.{e}" for n in names for e in ("png", "svg")}
    assert (folder / "report.html").stat().st_size < 2_000_000
    answer = paceline("study", "predict", str(folder), "--world-sizes=4,8", "--json", cwd=folder)
    assert [row["world_size"] for row in json.loads(answer.out)] == [4, 8, 4, 8]


def test_a_folder_of_another_study_is_refused(folder: Path) -> None:
    answer = paceline(*STUDY, "--base-lr=0.1", cwd=folder.parent)
    assert answer.code == 2, answer
    assert "another study" in answer.err
