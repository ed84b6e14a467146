"""Faults 1, 21, 23: ranks that die, once or repeatedly, and the reaction of the supervisor."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.processes import started
from harness.short_run import FLAGS, STEPS, injected_faults, outcome, read_failures, read_json, run_undisturbed
from paceline.errors import Cause

RECOVERIES: list[float] = []
PROMPT = "--no-async-save"  # checkpoints are written in the background: one may be missing two steps later


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, object]]:
    """The result of the run without faults, for each strategy."""

    @cache
    def train(strategy: str) -> dict[str, object]:
        return run_undisturbed(tmp_path_factory.mktemp(strategy), f"--strategy={strategy}")

    return train


def step_in(line: str) -> int:
    return int(re.findall(r"step (\d+)/", line)[0])


def kill_random_ranks(seed: int, folder: Path, strategy: str, kills: int) -> list[float]:
    """Kill a random rank several times, at a random time after a random step. Returns the seconds to the next step."""
    draw = random.Random(seed)
    recoveries = []
    with started(*FLAGS, f"--strategy={strategy}", cwd=folder) as run:
        at = 0
        for _ in range(kills):
            at = draw.randrange(at + 1, at + (STEPS - 2) // kills)
            seen = step_in(run.wait_for("step "))
            while seen < at:
                seen = step_in(run.wait_for("step "))
            time.sleep(draw.uniform(0, 0.05))  # not a synchronisation: this is the random time
            victims = run.ranks()
            assert len(victims) == 2
            os.kill(draw.choice(victims), signal.SIGKILL)
            killed_at = time.monotonic()
            run.wait_for("resumed " if seen > 7 else "paceline ")
            seen = step_in(run.wait_for("step "))
            recoveries.append(time.monotonic() - killed_at)
            at = max(at, seen)
        assert run.wait() == 0, run.err
    failures = read_failures(folder / "run")
    assert len(failures) == kills
    for failure in failures:
        assert failure["cause"] == Cause.RANK_KILLED
        # Five steps between two checkpoints, and a save that was running when the rank died.
        assert failure["lost_steps"] <= 10
    return recoveries


# Fault 1
def test_killed_rank_restarts_from_newest_checkpoint(
    tmp_path: Path, undisturbed: Callable[[str], dict[str, object]]
) -> None:
    kill_random_ranks(1, tmp_path, "ddp", kills=2)
    assert outcome(tmp_path / "run") == undisturbed("ddp")


# Fault 1
@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_twenty_killed_ranks(seed: int, tmp_path: Path, undisturbed: Callable[[str], dict[str, object]]) -> None:
    strategy = "fsdp" if seed % 3 == 0 else "ddp"
    RECOVERIES.extend(kill_random_ranks(100 + seed, tmp_path, strategy, kills=2))
    assert outcome(tmp_path / "run") == undisturbed(strategy)
    print(f"{len(RECOVERIES)} kills: p50 {statistics.median(RECOVERIES):.2f} s, max {max(RECOVERIES):.2f} s")
    assert statistics.median(RECOVERIES) <= 6
    assert max(RECOVERIES) <= 15


# Fault 21
def test_a_step_that_fails_three_times_ends_the_run(tmp_path: Path) -> None:
    flags = [*FLAGS, PROMPT, "--max-restarts=50"]
    answer = paceline(*flags, "--inject=raise rank=1 step=12 times=99", cwd=tmp_path)
    assert answer.code == 70, answer
    assert injected_faults(tmp_path / "run") == ["raise (rank 1, step 12)"] * 3
    assert [failure["is_restarted"] for failure in read_failures(tmp_path / "run")] == [True, True, False]
    failure = read_json(tmp_path / "run" / "failure.json")
    assert (failure["rank"], failure["step"], failure["phase"]) == (1, 12, "forward")
    assert (failure["cause"], failure["exit_code"], failure["lost_steps"]) == (Cause.INTERNAL, 70, 2)
    assert "paceline train run/config.yaml --resume auto" in failure["done"]
    assert "RuntimeError: injected: raise" in failure["traceback"]
    assert read_json(tmp_path / "run" / "status.json")["status"] == "failed"
    assert "Traceback" not in answer.err.replace(failure["traceback"], "")


@pytest.mark.faults
def test_restarts_are_counted(tmp_path: Path) -> None:
    faults = "kill rank=0 step=7; kill rank=1 step=14; kill rank=0 step=22"
    answer = paceline(*FLAGS, "--max-restarts=2", f"--inject={faults}", cwd=tmp_path)
    assert answer.code == 70, answer
    assert len(injected_faults(tmp_path / "run")) == 3
    assert [failure["step"] for failure in read_failures(tmp_path / "run")] == [7, 14, 22]
    failure = read_json(tmp_path / "run" / "failure.json")
    assert (failure["attempt"], failure["attempts"], failure["is_restarted"]) == (3, 3, False)


# Fault 23
@pytest.mark.faults
def test_a_rank_killed_for_its_memory_is_reported_as_such(tmp_path: Path) -> None:
    # The kernel's OOM killer cannot be used here without a separate memory cgroup. Its effects can be reproduced:
    # memory that grew, and a SIGKILL that no process of the run has sent.
    # Memory is measured twice a second. Pauses before and after it grows make the growth visible.
    pauses = [f"slow rank=1 step={step} seconds=2" for step in (4, 12)]
    faults = [pauses[0], "leak rank=1 step=12 megabytes=1500", pauses[1], "kill rank=1 step=13"]
    answer = paceline(*FLAGS, "--max-restarts=0", f"--inject={'; '.join(faults)}", cwd=tmp_path)
    assert answer.code == 70, answer
    assert len(injected_faults(tmp_path / "run")) == len(faults)
    failure = read_json(tmp_path / "run" / "failure.json")
    assert (failure["cause"], failure["rank"], failure["kind"]) == (Cause.OUT_OF_MEMORY, 1, "")
    assert "--auto-microbatch" in failure["hint"]
    assert "32 samples" in failure["what"]


@pytest.mark.faults
def test_out_of_memory_halves_the_microbatch_on_all_ranks(tmp_path: Path) -> None:
    flags = [*FLAGS, "--auto-microbatch", "--inject=oom rank=1 step=12 above=16"]
    answer = paceline(*flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert injected_faults(tmp_path / "run") == ["oom (rank 1, step 12)"]
    (failure,) = read_failures(tmp_path / "run")
    assert (failure["cause"], failure["is_restarted"]) == (Cause.OUT_OF_MEMORY, True)
    assert "batch     64 = 2 ranks x 32 (2 microbatches of 16)" in answer.out
    assert read_json(tmp_path / "run" / "results.json")["steps"] == STEPS


@pytest.mark.faults
def test_the_world_size_shrinks_if_a_rank_keeps_failing(tmp_path: Path) -> None:
    flags = [*FLAGS, PROMPT, "--processes=1:2", "--lanes=2", "--inject=kill rank=1 step=12 times=99"]
    answer = paceline(*flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert len(injected_faults(tmp_path / "run")) == 2
    assert [failure["is_restarted"] for failure in read_failures(tmp_path / "run")] == [True, True]
    assert read_json(tmp_path / "run" / "results.json")["world_size"] == 1


@pytest.mark.faults
def test_a_full_disk_a_damaged_checkpoint_and_a_kill_in_one_run(
    tmp_path: Path, undisturbed: Callable[[str], dict[str, object]]
) -> None:
    faults = "full-disk step=10; corrupt-latest step=22; kill rank=1 step=23"
    answer = paceline(*FLAGS, PROMPT, f"--inject={faults}", cwd=tmp_path)
    assert answer.code == 0, answer
    assert len(injected_faults(tmp_path / "run")) == 3
    assert "a checkpoint could not be saved: No space left on device" in answer.out
    assert "resumed   at step 15" in answer.out  # 20 is damaged
    assert "step-00000020" in answer.out
    assert outcome(tmp_path / "run") == undisturbed("ddp")
