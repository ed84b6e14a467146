"""Where the time before the first step goes, and the two clocks of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.ranks import make_world, run_ranks
from harness.runs import quick_config, read_results, train_in
from paceline.metrics.start_clock import STAGES, StartClock, describe_start
from paceline.runs.machine import age_s, identity_of
from paceline.training.components import build_components
from paceline.training.guards import Guards


def test_every_moment_belongs_to_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StartClock(age_s=2.5)
    for stage, seconds in (("group", 1.0), ("data", 2.0), ("model", 0.5), ("data", 0.25)):
        clock.enter(stage)
        with clock.set_up_from_data():
            now[0] += seconds
    clock.end()
    now[0] += 100.0
    clock.enter("model")  # a later call changes nothing
    found = clock.summary()
    assert set(found) == {"seconds", *STAGES}
    assert (found["import"], found["group"], found["data"], found["model"]) == (2.5, 1.0, 2.25, 0.5)
    assert found["seconds"] == sum(found[stage] for stage in STAGES)
    assert clock.set_up_s == 3.75
    assert "data 2.2" in describe_start(found)


def test_the_age_of_a_process() -> None:
    age = age_s(identity_of(os.getpid()))
    assert age is not None
    assert 0 < age < 3600
    assert age_s("17") is None


def test_a_first_layer_from_the_data_is_set_up() -> None:
    guards = Guards()
    build_components(quick_config("--model-name", "sprint", "--optimizer", "sgd"), make_world(0, 1), guards)
    assert 0 < guards.start.set_up_s <= guards.start.summary()["model"]


def test_results_have_both_clocks(tmp_path: Path) -> None:
    run_ranks(1, train_in, str(tmp_path), ("--model-name", "mlp", "--max-steps", "1"))
    found = read_results(tmp_path)
    clocks, ranks = found["clocks"], found["process_metrics"]
    assert clocks["test_seconds"] > 0
    assert clocks["first_to_last_step_seconds"] == ranks[0]["seconds_to_last_step"]
    parts = ("set_up_seconds", "first_to_last_step_seconds", "test_seconds")
    assert clocks["set_up_steps_and_test_seconds"] == sum(clocks[name] for name in parts)
    assert found["start_up"]["model"] > 0
