"""A suspended run is not a hang. It continues without a restart, and its result equals that of an undisturbed run."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from harness.processes import Started, parent_of, processes_in, started
from harness.ranks import run_ranks
from harness.short_run import FLAGS, outcome
from paceline.runs.machine import ProcessHandle
from paceline.runtime.detect import World
from paceline.runtime.pulse import GAP_S, Beat, HangClock, Pulse, RunningClock, read_pulse
from paceline.runtime.watchdog import Watchdog

pytestmark = pytest.mark.timeout(300)  # for a busy machine
DEADLINE_S = 20.0  # long enough for saves and imports on a busy machine
PAUSE_S = DEADLINE_S + 3  # the time to stop: longer than the deadline
LIMITS = [f"--hang-timeout-s={DEADLINE_S:g}", "--max-restarts=0"]


def suspend(pids: list[int]) -> None:
    """Stop processes for longer than the deadline, and continue them."""
    handles = [ProcessHandle(pid) for pid in pids]
    for handle in handles:
        handle.send(signal.SIGSTOP)
    while not all(handle.is_stopped for handle in handles if handle.is_running):
        pass
    time.sleep(PAUSE_S)
    for handle in handles:
        handle.send(signal.SIGCONT)


WHO: dict[str, Callable[[Started], list[int]]] = {
    "everything": lambda run: processes_in(run.folder),
    "one rank": lambda run: run.ranks()[1:],
    "all ranks": lambda run: run.ranks(),
    "the supervisor": lambda run: [run.process.pid],
}


@pytest.mark.faults
@pytest.mark.parametrize("who", WHO)
def test_a_suspended_run_continues(who: str, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """SIGSTOP of all or some processes, for longer than --hang-timeout-s: no restart, the same bits."""
    with started(*FLAGS, *LIMITS, cwd=tmp_path) as run:
        run.wait_for("step 12/")
        suspend(WHO[who](run))
        assert run.wait(100) == 0, run.err
    assert not (tmp_path / "run" / "failures.jsonl").exists()
    assert outcome(tmp_path / "run") == undisturbed
    if "rank" in who:
        assert "SIGCONT" in run.err


@pytest.mark.faults
@pytest.mark.parametrize("who", ["everything", "one rank"])
def test_a_suspended_run_under_torchrun_continues(who: str, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """A separate process watches the ranks of another launcher. It is suspended with them, or detects it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline"]
    flags = [flag for flag in FLAGS if "processes" not in flag]
    with started(*flags, *LIMITS, cwd=tmp_path, launcher=torchrun) as run:
        run.wait_for("step 12/")
        everything = processes_in(tmp_path)
        children = [pid for pid in everything if parent_of(pid) == run.process.pid]
        suspend(everything if who == "everything" else children[:1])
        assert run.wait(100) == 0, run.err
    assert outcome(tmp_path / "run") == undisturbed


def beat(since_s: float, allowed_s: float) -> Beat:
    return Beat(1, 5, "forward", 0, since_s, since_s + allowed_s)


def make_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test advances."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_gap_between_two_checks_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog did not run. The deadlines of its ranks move by that time, once, and only for the current phase."""
    now = make_clock(monkeypatch)
    clock = HangClock()
    found = []
    for seconds in (0.05, 3600.0, 0.05, 9.0 * 0.11, *[0.5] * 20):
        now[0] += seconds
        clock.look()
        found.append(clock.find_late({0: beat(100.0, 10.0)}, is_any_stopped=False))
    assert found[:4] == [[], [], [], []]
    assert [0] in found[4:], "the time in which it ran counts"
    assert found.index([0]) == 4 + 17  # 0.05 + 0.05 + 0.99 + 18 x 0.5 is more than ten seconds
    clock.look()
    assert clock.find_late({0: beat(now[0], 10.0)}, is_any_stopped=False) == []


def test_the_time_of_a_stopped_rank_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is stopped and the other waits for it. Neither is late until both have run for long enough."""
    now = make_clock(monkeypatch)
    clock = HangClock()
    beats = {0: beat(100.0, 2.0), 1: beat(100.0, 2.0)}
    late = []
    for look in range(2000):
        now[0] += 1 / 16
        clock.look()
        late = clock.find_late(beats, is_any_stopped=look < 1000)
        if late:
            break
    assert late == [0, 1]
    assert look == 1000 + 2 * 16


def test_a_running_clock_skips_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for peers or for a save do not count a suspension."""
    now = make_clock(monkeypatch)
    clock = RunningClock()
    for seconds in (1.0, GAP_S * 10, 0.5):
        now[0] += seconds
        _ = clock.seconds
    assert clock.seconds == 1.5


def test_a_suspended_step_does_not_change_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of an hour, suspended, must not give the next steps a limit of twenty hours."""
    now = make_clock(monkeypatch)
    watchdog = Watchdog(Pulse(tmp_path / "pulse"), is_supervised=True)

    def take_steps(numbers: range, suspended: int = 0) -> None:
        for number in numbers:
            for phase in ("data", "forward", "backward", "update"):
                watchdog.enter(phase, number)
                now[0] += 3600.0 if (number, phase) == (suspended, "backward") else 0.1

    take_steps(range(1, 5))
    take_steps(range(5, 8), suspended=6)
    found = read_pulse(tmp_path / "pulse")
    assert found is not None
    assert found.deadline_s - found.since_s == 30.0
    assert watchdog.longest_step_s < 1


def wait_longer_than_the_timeout(world: World) -> float:
    """Rank 1 is late, as after a suspension of the job during a collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from paceline.runtime.group import allow_suspension

    _set_pg_timeout(timedelta(seconds=1))
    allow_suspension()
    if world.rank == 1:
        time.sleep(2)
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def test_a_collective_of_a_suspended_job_does_not_time_out() -> None:
    """gloo counts the time of a suspension. After the first step its own limit does not end a run."""
    assert run_ranks(2, wait_longer_than_the_timeout) == [2.0, 2.0]


def test_all_processes_of_a_run_are_in_one_process_group(tmp_path: Path) -> None:
    """Ctrl-Z suspends a process group. Supervisor, fork server and ranks are in the same group."""
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 5/")
        groups = {os.getpgid(pid) for pid in processes_in(tmp_path)}
        assert len(run.ranks()) == 2
        assert groups == {run.process.pid}


def send_to_another_thread(pid: int, number: signal.Signals) -> None:
    """The kernel may deliver a signal to another thread if all threads were stopped when it was sent."""
    other = max(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
    assert other != pid, "it has one thread only"
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(pid, other, int(number)) == 0, os.strerror(ctypes.get_errno())


def test_a_stop_that_reaches_another_thread_of_the_supervisor_is_not_lost(tmp_path: Path) -> None:
    """Ctrl-Z, `paceline cancel`, `fg`: the main thread waits for ranks. The handler must still run."""
    with started(*FLAGS, "--epochs=200", cwd=tmp_path) as run:
        run.wait_for("step 5/")
        send_to_another_thread(run.process.pid, signal.SIGTERM)
        assert run.wait() == 75, run.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_reaches_another_thread_of_the_guard_is_forwarded(number: signal.Signals, tmp_path: Path) -> None:
    """The command for notebooks and flows waits in the same way."""
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); signal.pause()"
    guard = [sys.executable, "-m", "paceline.launch.child_guard", sys.executable, "-c", script]
    with subprocess.Popen(
        guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        send_to_another_thread(process.pid, number)
        assert process.wait(20) == 128 + number
