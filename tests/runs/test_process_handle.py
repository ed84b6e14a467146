"""Signals reach the intended process, and never a later process with the same process id."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.launch.watch import Watch
from paceline.runs import machine
from paceline.runs.machine import (
    Machine,
    ProcessHandle,
    end_group,
    find_forked,
    find_process,
    has_open_for_writing,
    process_start,
    stat_fields,
)
from paceline.runtime.pulse import Pulse, pulse_path

PAUSE = "import signal; print(flush=True); signal.pause()"


@pytest.fixture(params=["pidfd", "start time"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's pidfd, and as on a system without it."""
    if request.param == "start time":
        monkeypatch.delattr(os, "pidfd_open")
    return str(request.param)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PAUSE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_signal_reaches_the_process_until_it_is_reaped(kind: str, child: subprocess.Popen[str]) -> None:
    """A handle signals only its own living process."""
    handle = ProcessHandle(child.pid)
    assert (handle.is_running, handle.is_stopped) == (True, False)
    assert handle.send(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not handle.is_running, "a zombie has exited"
    assert child.wait() == -signal.SIGKILL
    assert not handle.is_running
    assert handle.state is None
    assert not handle.send(signal.SIGKILL)
    assert find_process(str(child.pid)) is None


def test_a_later_process_with_the_same_id_gets_no_signal(
    kind: str, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living process gets the forged process id of an ended one. It receives no signal."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        handle = ProcessHandle(ended.pid)
    handle.pid = child.pid  # the kernel has reused the process id
    assert not handle.send(signal.SIGKILL)
    assert not handle.is_running
    assert handle.state is None
    assert find_process(f"{child.pid}@1") is None, "another start time"
    assert find_process(f"{child.pid}@{process_start(child.pid)}") is not None
    with pytest.raises(ProcessLookupError):
        ProcessHandle(child.pid, parent=1)
    assert child.poll() is None


@pytest.mark.parametrize("pid", [0, -1])
def test_a_process_id_that_means_a_group_is_refused(pid: int) -> None:
    """0 and negative numbers would signal process groups."""
    with pytest.raises(ProcessLookupError):
        ProcessHandle(pid)


def test_the_watchdog_does_not_signal_a_reused_process_id(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    """The fork server has reaped a rank, and a foreign process has its id. The foreign process survives."""
    context = multiprocessing.get_context("forkserver")
    rank = context.Process(target=os.getpid)
    rank.start()
    assert rank.pid is not None
    handles = {0: find_forked(rank.pid)}
    Pulse(pulse_path(tmp_path, 0))
    watch = Watch(tmp_path, lambda number: tmp_path / "stacks", lambda: dict(handles))
    watch._look()
    rank.join()
    while find_forked(rank.pid) is not None:
        pass
    if handles[0] is not None:
        handles[0].pid = child.pid
    handles[1] = find_forked(child.pid)  # a rank that ended before its handle was opened
    watch._look()
    watch._signal_all(signal.SIGKILL)
    watch.stop_all(signal.SIGKILL)
    assert [watch.ranks[number].is_alive for number in (0, 1)] == [False, False]
    assert not any(state.was_ended_by_us for state in watch.ranks.values())
    assert child.poll() is None


GROUP = """
import os, signal, subprocess, sys
member = subprocess.Popen([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"])
print(member.pid, flush=True)
if sys.argv[1] == "stays":
    signal.pause()
"""


@pytest.mark.parametrize("leader", ["stays", "has exited"])
def test_a_group_is_ended_before_its_leader_is_reaped(leader: str) -> None:
    """Members that outlive the leader are killed while the leader's process id is still reserved."""
    with subprocess.Popen(
        [sys.executable, "-c", GROUP, leader], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline(), process.stdout.readline()}
        member = ProcessHandle(int(max(lines)))
        if leader == "has exited":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        end_group(process, grace_s=0.0)
        member.wait()
    assert process.returncode in ((-signal.SIGTERM, -signal.SIGKILL) if leader == "stays" else (0,))


MAIN_THREAD_EXITS = """
import ctypes, sys, threading
def hold():
    with open(sys.argv[1], "w"):
        print("open", flush=True)
        sys.stdin.read()
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_without_its_main_thread_is_not_dead(tmp_path: Path) -> None:
    """It looks like a zombie, but its other threads still write."""
    held = tmp_path / "held"
    command = [sys.executable, "-c", MAIN_THREAD_EXITS, str(held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        while stat_fields(process.pid)[0] != "Z":
            time.sleep(0.001)
        assert Machine().exists(process.pid)
        assert has_open_for_writing(process.pid, held) is None  # unknown on this system
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not Machine().exists(process.pid)
        assert has_open_for_writing(process.pid, held) is False


def test_only_this_module_signals_plain_process_ids() -> None:
    """os.kill and os.killpg are called for the process itself, or in machine.py."""
    source = Path(paceline.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func) in ("os.kill", "os.killpg") and ast.unparse(node.args[0]) != "os.getpid()":
                found.add(str(path.relative_to(source)))
    assert found <= {
        Path(machine.__file__).relative_to(source).as_posix(),
        "runs/machine.py",
    }  # the latter only checks, with signal 0
