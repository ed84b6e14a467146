"""`paceline.train` keeps a process with torch imported between calls: one server, no state of another run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import paceline
from harness.cli import environment
from paceline.launch import warm
from paceline.runs.machine import ProcessHandle, stat_fields

pytestmark = pytest.mark.long

SMALL: dict[str, Any] = {
    "recipe": "synthetic-mlp",
    "num_samples": 640,
    "global_batch_size": 64,
    "epochs": 1,
    "processes": 1,
    "track": (),
    "quiet": True,
}
STATE = """
import os, sys
import numpy as np

seen = sys.modules.setdefault("state_of_a_user", type(sys)("state_of_a_user"))


def load(seed):
    seen.count = getattr(seen, "count", 0) + 1
    with open(os.environ["PACELINE_TEST_NOTES"], "a") as file:
        file.write(f"{seen.count} {os.environ.get('LEFT_BY_A_RUN')} {os.getcwd()} {np.random.random()}\\n")
    os.environ["LEFT_BY_A_RUN"] = "1"
    np.random.seed(0)
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (640, 8, 8, 3), dtype=np.uint8)
    return (pixels, np.arange(640) % 4), (pixels[:64], np.arange(64) % 4)
"""


def train(folder: Path, **settings: Any) -> paceline.Run:
    return paceline.train(output_dir=folder, **{**SMALL, **settings})


def server_pid() -> int:
    assert warm._current is not None
    return warm._current._process.pid


def wait_for_end(pid: int) -> None:
    try:
        handle = ProcessHandle(pid)
    except ProcessLookupError:
        return
    deadline_s = time.monotonic() + 20
    while handle.is_running and stat_fields(pid)[:1] != ["Z"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_warm_and_cold_runs_are_equal_and_share_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [train(tmp_path / "first")]
    first = server_pid()
    runs.append(train(tmp_path / "second"))
    monkeypatch.setenv("PACELINE_TEST", "1")  # our own variables are read at each run
    runs.append(train(tmp_path / "third"))
    assert server_pid() == first
    monkeypatch.setenv(warm.WARM, "off")
    runs.append(train(tmp_path / "cold"))
    assert len({run.results["weights_sha256"] for run in runs}) == 1
    assert len({run.results["test_loss"] for run in runs}) == 1
    commands = [run_command(run) for run in runs]
    assert commands[0][:2] == commands[3][:2]


def run_command(run: paceline.Run) -> list[str]:
    import json

    command: list[str] = json.loads((run.path / "environment.json").read_text())["command"]
    return command


def test_no_state_of_a_run_reaches_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, notes = tmp_path / "own.py", tmp_path / "notes.txt"
    source.write_text(STATE)
    monkeypatch.setenv("PACELINE_TEST_NOTES", str(notes))
    for number in range(2):
        train(tmp_path / str(number), recipe="shapes-cnn", data=f"{source}:load", augment="none")
    first, second = (line.split() for line in notes.read_text().splitlines())
    assert first[:3] == second[:3] == ["1", "None", str(Path.cwd())]
    assert first[3] != second[3]  # random numbers without a seed differ


@pytest.mark.long
def test_variables_that_libraries_read_at_import_start_a_new_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "first")
    first = server_pid()
    monkeypatch.setenv("OF_SOME_LIBRARY", "1")
    train(tmp_path / "second")
    second = server_pid()
    assert second != first
    wait_for_end(first)
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "third", omp_num_threads=2)
    assert server_pid() not in (first, second)
    assert paceline.load_run(tmp_path / "third").results["process_metrics"][0]["threads"] == 2


def test_a_killed_server_is_replaced(tmp_path: Path) -> None:
    train(tmp_path / "first")
    pid = server_pid()
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    train(tmp_path / "second")
    assert server_pid() != pid


@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_the_server_ends_with_the_process(number: int, tmp_path: Path) -> None:
    """Even if a forked process still has a copy of the connection."""
    script = """
import os, sys, time
import paceline
from paceline.launch import warm
paceline.train("synthetic-mlp", num_samples=640, global_batch_size=64, epochs=1, processes=1, track=(), quiet=True)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(warm._current._process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tmp_path,
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            pid = int(process.stdout.readline())
            if number:
                process.kill()
            else:
                process.stdin.close()
            wait_for_end(pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_an_error_before_the_start_prints_its_screen(tmp_path: Path) -> None:
    """The command detects this error, not the library."""
    source = tmp_path / "own.py"
    source.write_text("def load(seed):\n    raise ValueError('mine')\n")
    with pytest.raises(paceline.errors.PacelineError) as caught:
        train(tmp_path / "run", data=f"{source}:load")
    assert "mine" in caught.value.screen()


def test_ctrl_c_while_torch_is_imported_leaves_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OF_SOME_LIBRARY", "2")
    started: list[int] = []

    def interrupt(server: warm.WarmServer) -> None:
        started.append(server._process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(warm.WarmServer, "wait_until_loaded", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    assert warm._current is None
    wait_for_end(started[0])


def test_a_run_starts_without_a_server_if_it_cannot_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OF_SOME_LIBRARY", "3")
    monkeypatch.setattr(warm, "_MODULE", "paceline.launch.no_such_module")
    assert train(tmp_path / "run").status == "finished"
    assert warm._current is None
