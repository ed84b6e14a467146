"""Faults 12 and 22: ranks that hang are detected and ended; slow ranks are named and continue."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.processes import started
from harness.short_run import FLAGS, injected_faults, outcome, read_failures
from paceline.errors import Cause

DEADLINE_S = 4
HANGS = {
    "in forward": ("hang rank=1 step=12", 1, "forward"),
    "in data": ("hang rank=0 step=12 phase=data", 0, "data"),
    "in save": ("hang rank=0 step=15 phase=save", 0, "save"),
    "in evaluation": ("hang rank=1 step=20 phase=evaluate", 1, "evaluate"),
    "in C, holding the lock": ("freeze rank=1 step=12", 1, "forward"),
}


def check_hang(case: str, folder: Path, undisturbed: dict[str, object]) -> None:
    fault, rank, phase = HANGS[case]
    with started(*FLAGS, f"--hang-timeout-s={DEADLINE_S}", f"--inject={fault}", cwd=folder) as run:
        run.wait_for("step 10/")
        ledger = folder / "run" / "faults.jsonl"
        give_up_at = time.monotonic() + 20
        while not ledger.exists():
            assert time.monotonic() < give_up_at, run.err
        fault_at = time.monotonic()
        run.wait_for("resumed ", timeout_s=30)
        run.wait_for("step ", timeout_s=30)
        recovered_s = time.monotonic() - fault_at
        assert run.wait() == 0, run.err
    assert len(injected_faults(folder / "run")) == 1
    assert recovered_s <= DEADLINE_S + 10
    (failure,) = read_failures(folder / "run")
    assert (failure["cause"], failure["rank"], failure["phase"]) == (Cause.HANG, rank, phase), run.err
    assert re.search(r"training/inject\.py:\d+ in _carry_out", failure["stands_at"])
    for number in (0, 1):
        assert "File " in (folder / "run" / "stacks" / f"attempt-1-rank-{number}.txt").read_text()
    assert outcome(folder / "run") == undisturbed


# Fault 12
def test_a_hang_is_detected_and_named(tmp_path: Path, undisturbed: dict[str, object]) -> None:
    check_hang("in C, holding the lock", tmp_path, undisturbed)


# Fault 12
@pytest.mark.faults
@pytest.mark.parametrize("case", [case for case in HANGS if case != "in C, holding the lock"])
def test_hangs_in_every_phase(case: str, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    check_hang(case, tmp_path, undisturbed)


# Fault 12
@pytest.mark.faults
def test_a_hang_without_restarts_ends_the_run_with_its_own_exit_code(tmp_path: Path) -> None:
    flags = ["--max-restarts=0", f"--hang-timeout-s={DEADLINE_S}", "--inject=hang rank=1 step=12"]
    answer = paceline(*FLAGS, *flags, cwd=tmp_path)
    assert answer.code == 6, answer
    assert injected_faults(tmp_path / "run") == ["hang (rank 1, step 12)"]
    (failure,) = read_failures(tmp_path / "run")
    assert (failure["cause"], failure["rank"], failure["exit_code"]) == (Cause.HANG, 1, 6)
    assert failure["others"]["0"].startswith("reduce of step 12")


# Fault 12
@pytest.mark.faults
def test_a_rank_under_another_launcher_detects_its_own_hang(tmp_path: Path) -> None:
    import sys

    from harness.cli import command

    answer = command(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "paceline", *(flag for flag in FLAGS if "processes" not in flag)),
        *(f"--hang-timeout-s={DEADLINE_S}", "--inject=hang rank=1 step=12"),
        cwd=tmp_path,
        timeout_s=90,
    )
    assert answer.code == 1, answer
    assert injected_faults(tmp_path / "run") == ["hang (rank 1, step 12)"]
    stacks = sorted((tmp_path / "run" / "stacks").glob("*.txt"))
    assert [path.name for path in stacks] == ["attempt-1-rank-0.txt", "attempt-1-rank-1.txt"]
    assert "_carry_out" in stacks[1].read_text()


# Fault 22
@pytest.mark.faults
def test_a_slow_rank_is_named_and_not_killed(tmp_path: Path) -> None:
    slow = "slow rank=1 step=11 steps=20 seconds=0.2"
    answer = paceline(*FLAGS, "--log-frequency=5", "--hang-timeout-s=20", f"--inject={slow}", cwd=tmp_path)
    assert answer.code == 0, answer
    assert injected_faults(tmp_path / "run") == ["slow (rank 1, step 11)"]
    assert re.search(r"warning: rank 1 is slow: [\d.]+ times", answer.out)
    assert "rank 0 is slow" not in answer.out
    assert not (tmp_path / "run" / "failures.jsonl").exists()
