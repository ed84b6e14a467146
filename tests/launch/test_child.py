"""A `paceline` command that another process of ours has started ends with its parent and reports its failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import environment
from harness.processes import kill_all_in, parent_of, processes_in, seconds_until_empty
from paceline.data.known_files import CIFAR10_FILES, CIFAR10_FOLDER
from paceline.errors import DataError, UserError
from paceline.launch.child import start_child
from paceline.settings.small_files import read_json_object

ENDLESS = ["--num-samples=640", "--global-batch-size=64", "--epochs=100000", "--processes=2", "--track"]
STUDY = ["study", "shapes-cnn", "--world-sizes=1", "--strategies=ddp", "--output-dir=study", "--num-samples=640"]
PARENTS = {
    "equivalence": ["equivalence", "shapes-cnn", "--world-sizes=1,2", "--output-dir=runs", *ENDLESS[:3], "--track"],
    "study": [*STUDY, "--epochs=100000", "--global-batch-size=64"],
}


@pytest.mark.parametrize("parent", PARENTS)
def test_a_killed_parent_leaves_no_process(parent: str, tmp_path: Path) -> None:
    """The guard stops the training. Its ranks save and end."""
    command = [sys.executable, "-m", "paceline", *PARENTS[parent]]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as process:
        try:
            while not list(tmp_path.rglob("metrics.csv")):
                with pytest.raises(subprocess.TimeoutExpired):  # it must not end by itself
                    process.wait(0.1)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert seconds_until_empty(tmp_path, limit_s=60) < 60
        finally:
            kill_all_in(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["train", "no-such-recipe"], UserError, 2),
        (["train", "cifar10-cnn", "--data-dir=.", "--processes=1"], DataError, 3),  # from a rank
    ],
)
def test_a_child_reports_its_error_with_all_fields(
    arguments: list[str], kind: type[Exception], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent gets the error with its class and fields, also from a rank. The child does not print it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / CIFAR10_FOLDER).mkdir()
    for name in CIFAR10_FILES:
        (tmp_path / CIFAR10_FOLDER / name).write_bytes(b"damaged")
    with (
        (tmp_path / "errors").open("wb") as errors,
        start_child(arguments, stdout=subprocess.DEVNULL, stderr=errors, shows_error=True) as child,
    ):
        assert child.wait() == code
        error = child.error()
    assert type(error) is kind
    assert error.exit_code == code
    assert error.what
    assert error.what not in (tmp_path / "errors").read_text()


IN_PYTHON = """
import os, subprocess, sys, time
from paceline.launch.child import start_child
with start_child(["train", *sys.argv[2:]], stdout=subprocess.DEVNULL) as child:
    if sys.argv[1] == "forks" and os.fork() == 0:  # holds all descriptors of its parent, also the guard's input
        os.chdir("/")
        print(os.getpid(), flush=True)
        time.sleep(120)
        os._exit(0)
    child.wait()
"""


@pytest.mark.parametrize("case", ["guard is killed", "parent is killed", "parent has forked and is killed"])
def test_a_training_never_outlives_its_guard_or_its_parent(case: str, tmp_path: Path) -> None:
    """The run saves and ends if either of them is killed."""
    words = ["forks" if "forked" in case else "waits", *ENDLESS, "--output-dir=run"]
    command = [sys.executable, "-c", IN_PYTHON, *words]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            holder = int(process.stdout.readline()) if "forked" in case else None
            while not (tmp_path / "run" / "metrics.csv").exists():
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.1)
            (guard,) = [pid for pid in processes_in(tmp_path) if parent_of(pid) == process.pid]
            os.kill(guard if "guard" in case else process.pid, signal.SIGKILL)
            assert seconds_until_empty(tmp_path, limit_s=60) < 60
        finally:
            kill_all_in(tmp_path)
            if holder is not None:
                os.kill(holder, signal.SIGKILL)
    assert read_json_object(tmp_path / "run" / "status.json")["status"] == "preempted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_guard_starts_is_not_lost(number: signal.Signals, tmp_path: Path) -> None:
    """The parent starts the guard with the signal blocked. The guard then starts nothing."""
    mark = tmp_path / "started"
    command = [sys.executable, "-m", "paceline.launch.child_guard", sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with guard:
        guard.send_signal(number)
        assert guard.wait(60) == (130 if number == signal.SIGINT else 75)
    assert not mark.exists()
