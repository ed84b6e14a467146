"""A suspended run is not a hung one: it goes on where it stood, with no restart, and ends as an undisturbed one."""

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
from harness.short_run import FLAGS, outcome, run_undisturbed
from paceline.runs.process_handle import ProcessHandle
from paceline.runtime.detect import World
from paceline.runtime.pulse import Beat, Pulse, read_pulse
from paceline.runtime.running_clock import GAP_S, HangClock, RunningClock
from paceline.runtime.watchdog import Watchdog

pytestmark = pytest.mark.timeout(300)  # a busy machine
DEADLINE_S = 20.0  # saves and imports of a busy machine fit
PAUSE_S = DEADLINE_S + 3  # what stopping needs: longer than the deadline
LIMITS = [f"--hang-timeout-s={DEADLINE_S:g}", "--max-restarts=0"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


def suspend(pids: list[int]) -> None:
    """Stop processes for longer than the deadline, and let them go on."""
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
def test_a_suspended_run_goes_on(who: str, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """SIGSTOP of the whole job, or of parts of it, for longer than --hang-timeout-s: no restart, the same bits."""
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
def test_a_suspended_run_below_torchrun_goes_on(who: str, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """Ranks of another launcher are watched by a process of their own, which is suspended with them or sees it."""
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
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_gap_between_looks_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch did not run: its ranks' deadlines move by that time, once, and only for the phase of that time."""
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


def test_time_in_which_a_rank_is_stopped_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is stopped and the other waits for it: neither is late until both run again for long enough."""
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


def test_a_running_clock_leaves_out_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for peers or for a save does not count a suspension."""
    now = make_clock(monkeypatch)
    clock = RunningClock()
    for seconds in (1.0, GAP_S * 10, 0.5):
        now[0] += seconds
        _ = clock.seconds
    assert clock.seconds == 1.5


def test_nothing_is_learned_from_a_suspended_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of an hour in suspension must not allow the next ones twenty hours."""
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
    """Rank 1 comes late, as after a suspension of the job in the middle of a collective."""
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
    """gloo counts the time of a suspension; from the first step on its own limit does not end a run."""
    assert run_ranks(2, wait_longer_than_the_timeout) == [2.0, 2.0]


def test_ctrl_z_would_stop_all_processes_of_a_run(tmp_path: Path) -> None:
    """A terminal suspends a process group: supervisor, fork server and ranks are in one."""
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 5/")
        groups = {os.getpgid(pid) for pid in processes_in(tmp_path)}
        assert len(run.ranks()) == 2
        assert groups == {run.process.pid}


def send_to_another_thread(pid: int, number: signal.Signals) -> None:
    """What the kernel may do with a signal that was sent while all threads were stopped."""
    other = max(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
    assert other != pid, "it has one thread only"
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(pid, other, int(number)) == 0, os.strerror(ctypes.get_errno())


def test_a_stop_that_reaches_another_thread_of_the_supervisor_is_not_lost(tmp_path: Path) -> None:
    """Ctrl-Z, `paceline cancel`, `fg`: the main thread waits for ranks, and the handler runs all the same."""
    with started(*FLAGS, "--epochs=200", cwd=tmp_path) as run:
        run.wait_for("step 5/")
        send_to_another_thread(run.process.pid, signal.SIGTERM)
        assert run.wait() == 75, run.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_reaches_another_thread_of_the_guard_is_passed_on(number: signal.Signals, tmp_path: Path) -> None:
    """The notebook's and the flow's command waits in the same way."""
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); signal.pause()"
    guard = [sys.executable, "-m", "paceline.launch.child_guard", sys.executable, "-c", script]
    with subprocess.Popen(
        guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        send_to_another_thread(process.pid, number)
        assert process.wait(20) == 128 + number
