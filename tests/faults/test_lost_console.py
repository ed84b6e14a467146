"""A closed terminal, a closed pipe or a reader that stops reading does not end or change a run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from harness.cli import environment
from harness.processes import kill_all_in
from harness.short_run import FLAGS, outcome, read_json, run_undisturbed

ONE_RANK = [*(flag for flag in FLAGS if "processes" not in flag), "--processes=1"]
WAIT_S = 100
pytestmark = pytest.mark.timeout(300)  # several runs, on a machine that may be busy
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def undisturbed_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """On one rank."""
    return run_undisturbed(tmp_path_factory.mktemp("alone"), "--processes=1")


@contextmanager
def piped(*arguments: str, cwd: Path, pipe_bytes: int = 65536) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command whose standard output and error are one pipe. Yields the end to read from."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, pipe_bytes)
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=writer, stderr=writer, start_new_session=True
    )
    os.close(writer)
    try:
        yield process, reader
    finally:
        with suppress(OSError):
            os.close(reader)
        kill_all_in(cwd)
        process.wait(WAIT_S)


def read_until(descriptor: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        data = os.read(descriptor, 4096)
        assert data, seen.decode()
        seen += data
    return seen


def check_log_continues(folder: Path) -> None:
    """The lines that the console lost are in the log of rank 0, and the status names the loss."""
    log = (folder / "run" / "logs" / "rank-0.log").read_text()
    assert "step 40/40" in log
    assert "paceline cancel run" in log
    status = read_json(folder / "run" / "status.json")
    assert (status["status"], status["console"].partition(" ")[0]) == ("finished", "lost")


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """`paceline train | head`: exit code 0 and the same weights."""
    with piped("-m", "paceline", *FLAGS, cwd=tmp_path) as (process, reader):
        read_until(reader, b"step 5/")
        os.close(reader)
        assert process.wait(WAIT_S) == 0
    assert outcome(tmp_path / "run") == undisturbed
    check_log_continues(tmp_path)


@pytest.mark.faults
def test_a_closed_pipe_does_not_end_a_run_under_torchrun(tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """The same with the ranks of torchrun."""
    flags = [flag for flag in FLAGS if "processes" not in flag]
    with piped(*TORCHRUN, "-m", "paceline", *flags, cwd=tmp_path) as (process, reader):
        read_until(reader, b"step 5/")
        os.close(reader)
        assert process.wait(WAIT_S) == 0
    assert outcome(tmp_path / "run") == undisturbed
    check_log_continues(tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("moment", ["start", "restart"])
def test_a_pipe_closed_around_the_start_of_ranks(moment: str, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """Before the first line, and before the supervisor reports a failure and restarts."""
    fault = ["--inject=kill rank=1 step=12"] if moment == "restart" else []
    with piped("-m", "paceline", *FLAGS, *fault, cwd=tmp_path) as (process, reader):
        if moment == "restart":
            read_until(reader, b"step 5/")
        os.close(reader)
        assert process.wait(WAIT_S) == 0
    assert outcome(tmp_path / "run") == undisturbed
    if moment == "restart":
        assert "attempt 1 of 4 failed" in (tmp_path / "run" / "logs" / "supervisor.log").read_text()


@pytest.mark.faults
def test_a_reader_that_stops_reading_does_not_block_a_run(tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """A full pipe that is not read (Ctrl-S, a stopped pager): no hang is reported, the run finishes."""
    flags = [*FLAGS, "--hang-timeout-s=20", "--max-restarts=0"]
    with piped("-m", "paceline", *flags, cwd=tmp_path, pipe_bytes=4096) as (process, reader):
        assert process.wait(WAIT_S) == 0
        assert os.read(reader, 65536).startswith(b"paceline")
    assert outcome(tmp_path / "run") == undisturbed
    assert "step 40/40" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


@pytest.mark.faults
def test_a_run_without_standard_output(tmp_path: Path) -> None:
    """`>&- 2>&-`: no file of the run gets the descriptor of the console."""
    script = f'exec "{sys.executable}" -m paceline {" ".join(ONE_RANK)} >&- 2>&-'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment(), timeout=WAIT_S, check=False)
    assert done.returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if row["kind"] == "step"]) == 40


def close_terminal_of(arguments: list[str], folder: Path) -> int:
    """Run a command as the leader of a session on a terminal, and close the terminal. Returns the exit code."""
    variables = {**environment(), "TERM": "xterm", "CI": ""}
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, *arguments], variables)
    try:
        read_until(master, b"step 5/")
        os.close(master)  # the kernel sends SIGHUP to the leader; every write fails with EIO
        deadline = time.monotonic() + WAIT_S
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill_all_in(folder)


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_terminal_does_not_end_a_run(
    ranks: int, tmp_path: Path, undisturbed: dict[str, object], undisturbed_alone: dict[str, object]
) -> None:
    """A lost ssh connection: a real SIGHUP and real EIO. Exit code 0, the same weights."""
    flags = FLAGS if ranks == 2 else ONE_RANK
    assert close_terminal_of(["-m", "paceline", *flags], tmp_path) == 0
    log = (tmp_path / "run" / "logs" / "supervisor.log").read_text()
    assert "SIGHUP" in log
    assert "paceline cancel run, or kill -TERM" in log
    check_log_continues(tmp_path)
    assert "\x1b" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text(), "no live line in a log"
    assert outcome(tmp_path / "run") == (undisturbed if ranks == 2 else undisturbed_alone)


@pytest.mark.faults
def test_sighup_is_a_stop_request_with_stop_signals_sighup(tmp_path: Path) -> None:
    """--stop-signals SIGHUP: the run saves and ends."""
    flags = [*FLAGS, "--stop-signals", "SIGHUP", "SIGTERM"]
    assert close_terminal_of(["-m", "paceline", *flags], tmp_path) == 75
    assert read_json(tmp_path / "run" / "status.json")["reason"] == "SIGHUP"


@pytest.mark.faults
def test_a_closed_terminal_under_torchrun_saves(tmp_path: Path) -> None:
    """torchrun ends on SIGHUP and kills its ranks 30 s later. They save and end before that."""
    flags = [flag for flag in FLAGS if "processes" not in flag]
    assert close_terminal_of([*TORCHRUN, "-m", "paceline", *flags, "--epochs=50"], tmp_path) != 0
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["status"], status["reason"]) == ("preempted", signal.SIGHUP.name)


def run_without_reader(arguments: list[str], folder: Path, **extra: str) -> tuple[int, str]:
    """As with `| head -1`, whose pipe is closed from the start. Returns the exit code and standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    with (folder / "err").open("wb") as errors:
        command = [sys.executable, "-m", "paceline", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment(**extra), stdout=writer, stderr=errors, timeout=WAIT_S, check=False
        )
    os.close(writer)
    return done.returncode, (folder / "err").read_text()


READING = [["recipes"], ["runs"], ["plan", "shapes-cnn"], ["course"], ["--help"], ["train", "--help"], ["logs", "run"]]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_closed_pipe_does_not_change_the_exit_code_of_a_listing(
    arguments: list[str], unbuffered: str, tmp_path: Path
) -> None:
    """`paceline recipes | head -1`: no traceback, and not Python's exit code 120."""
    make_log(tmp_path / "run")
    assert run_without_reader(arguments, tmp_path, PYTHONUNBUFFERED=unbuffered) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_closed_pipe_does_not_change_the_exit_code_of_compare(unbuffered: str, tmp_path: Path) -> None:
    """The result of `compare` is its exit code. A user error stays a user error."""
    make_log(tmp_path / "run")
    code, shown = run_without_reader(["compare", "run", "nowhere"], tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert (code, "nowhere" in shown) == (2, True)


def test_watch_with_a_closed_pipe_ends_like_an_interrupt(tmp_path: Path) -> None:
    """`watch` returns the exit code of the run, which is not known yet."""
    make_log(tmp_path / "run")
    assert run_without_reader(["watch", "run"], tmp_path) == (130, "")


def make_log(folder: Path) -> None:
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("{}\n")
    (folder / "metrics.jsonl").write_text("")
    (folder / "logs" / "rank-0.log").write_text("a line\n" * 10)
