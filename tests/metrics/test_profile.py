"""`paceline train --profile`: traces of some steps of every rank. No bit of the result changes."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cli import command, paceline
from harness.ranks import make_world, run_ranks
from harness.runs import quick_config, read_results, train_in
from paceline.metrics.phases import PhaseClock
from paceline.metrics.profile import StepProfiler, covered
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.training.components import hash_config
from paceline.training.guards import Guards
from paceline.training.loop import train

MARKS = ("data", "forward", "backward", "reduce", "update")
TINY = ["--num-samples=640", "--epochs=1", "--global-batch-size=16", "--track"]  # 36 steps


FLAGS = ["train", "shapes-cnn", *TINY, "--profile", "--device=cpu"]
SHORT = ("--num-samples=160", "--global-batch-size=16")  # two epochs of 9 steps


def marks_in(folder: Path, rank: int) -> dict[str, int]:
    with gzip.open(folder / "profile" / f"rank-{rank}.json.gz") as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert "aten::convolution_backward" in names
    return {mark: names.count(mark) for mark in MARKS}


def check_profiled(folder: Path, ranks: int) -> dict[str, Any]:
    results = read_results(folder)
    names = [f"rank-{rank}.json.gz" for rank in range(ranks)]
    assert sorted(path.name for path in (folder / "profile").iterdir()) == [*names, "top.txt"]
    for rank in range(ranks):
        assert marks_in(folder, rank) == dict.fromkeys(MARKS, 10)
    found = results["profile"]
    assert (found["folder"], found["files"], found["first_step"], found["steps"]) == ("profile", names, 11, 10)
    assert found["device_busy_share"] is None  # there is no GPU
    assert len(found["top"]) == 10
    lines = (folder / "profile" / "top.txt").read_text().splitlines()
    assert lines[0].startswith("steps 11 to 20 of rank 0, ")
    assert [line[:20].strip() for line in lines[3:]] == [operator["name"][:20].strip() for operator in found["top"]]
    return results


@pytest.mark.long
def test_supervised_ranks_write_traces_and_keep_the_bits_of_a_run_without(tmp_path: Path) -> None:
    answer = paceline(
        *FLAGS, "--processes=2", "--output-dir=ours", cwd=tmp_path, PACELINE_CACHE=str(tmp_path / "cache")
    )
    assert (answer.code, answer.err) == (0, "")
    ours = check_profiled(tmp_path / "ours", 2)
    limit, profile = (line for line in answer.out.splitlines() if line.startswith(("limit ", "profile ")))
    assert limit == f"limit     {ours['limits']['verdict']['text']}; next: {ours['limits']['verdict']['try']}"
    assert profile.startswith("profile   ours/profile: top.txt, and steps 11 to 20 of every rank")
    # The recorded steps and the first ones are not in the figures.
    assert {entry["steps"] for entry in ours["process_metrics"]} == {ours["limits"]["steps"]} == {36 - 10 - 10}
    plain, _ = run_ranks(2, train_in, str(tmp_path / "plain"), tuple(TINY))
    assert "profile" not in plain
    assert ours["weights_sha256"] == plain["weights_sha256"]


@pytest.mark.slow
def test_ranks_of_torchrun_write_traces(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "paceline"]
    answer = command(*torchrun, *FLAGS, "--output-dir=theirs", cwd=tmp_path, PACELINE_CACHE=str(tmp_path / "cache"))
    assert answer.code == 0, answer
    theirs = check_profiled(tmp_path / "theirs", 2)
    plain, _ = run_ranks(2, train_in, str(tmp_path / "plain"), tuple(TINY))
    assert theirs["weights_sha256"] == plain["weights_sha256"]


def test_one_process_records_the_steps_that_fit_into_an_epoch(tmp_path: Path) -> None:
    world, folder = make_world(0, 1), RunFolder(tmp_path / "run")
    folder.create()
    asked: list[int] = []
    guards = Guards(profiler=StepProfiler(world, folder, asked.append))
    torch.set_num_threads(1)
    results = train(quick_config(*SHORT), world, RunPlace(folder.path, None), guards).to_json()
    assert asked == [18]
    assert (results["profile"]["first_step"], results["profile"]["steps"]) == (11, 8)
    assert marks_in(folder.path, 0) == {**dict.fromkeys(MARKS, 8), "reduce": 0}
    assert results["weights_sha256"] == train_in(world, str(tmp_path / "plain"), SHORT)["weights_sha256"]


def run_steps(profiler: StepProfiler, clock: PhaseClock, first: int, last: int, end: str) -> None:
    """The phases in the order of the training loop."""
    for step in range(first, last + 1):
        for phase in ("data", "forward", "backward", "update"):
            profiler.enter(phase, step, clock)
            clock.enter(phase)
    profiler.enter(end, last, clock)
    clock.enter(end)


def test_two_steps_before_the_end_of_an_epoch_are_too_few_and_retried(tmp_path: Path) -> None:
    folder, clock = RunFolder(tmp_path), PhaseClock()
    stale = tmp_path / "profile" / "rank-3.json.gz"
    stale.parent.mkdir()
    stale.write_text("of an earlier attempt with more ranks")
    profiler = StepProfiler(make_world(0, 1), folder, lambda step: None)
    run_steps(profiler, clock, 1, 12, "save")
    assert profiler.result is None
    run_steps(profiler, clock, 13, 40, "save")
    assert profiler.result is not None
    assert (profiler.result.first_step, profiler.result.steps) == (13, 10)
    assert clock.summary()["steps"] == 40 - 12 - 10
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["rank-0.json.gz", "top.txt"]


def test_the_last_steps_of_a_run_are_recorded_and_a_very_short_run_has_none(tmp_path: Path) -> None:
    short = StepProfiler(make_world(0, 1), RunFolder(tmp_path), lambda step: None)
    run_steps(short, PhaseClock(), 1, 11, "finish")
    assert short.result is not None
    assert short.result.steps == 1
    shorter = StepProfiler(make_world(0, 1), RunFolder(tmp_path), lambda step: None)
    run_steps(shorter, PhaseClock(), 1, 10, "finish")
    assert shorter.result is None


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("in the way")
    profiler = StepProfiler(make_world(0, 1), RunFolder(tmp_path), lambda step: None)
    run_steps(profiler, PhaseClock(), 1, 30, "finish")
    assert "profile cannot be written" in caplog.text


def test_overlapping_work_counts_once() -> None:
    assert covered([]) == 0.0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0


def test_profile_does_not_change_the_identity_of_a_run() -> None:
    assert hash_config(quick_config("--profile")) == hash_config(quick_config())
