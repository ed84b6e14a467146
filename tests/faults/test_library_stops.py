"""`paceline.train` is interrupted, or killed with its Python process: the run is saved and no process remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.cli import environment
from harness.processes import Started, kill_all_in, seconds_until_empty
from harness.short_run import read_json
from paceline.checkpoints.format import step_folders, step_of, verify

pytestmark = pytest.mark.faults
SCRIPT = """
import paceline
paceline.train(epochs=50, num_samples=640, global_batch_size=64, log_frequency=1, track=(), output_dir="run")
"""


@contextmanager
def training(folder: Path) -> Iterator[Started]:
    with (
        (folder / "stderr.txt").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=folder,
            env=environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Started(process, folder)
        finally:
            kill_all_in(folder)


@pytest.mark.parametrize(
    ("number", "state", "reason"),
    [(signal.SIGINT, "stopped", "interrupted by the user"), (signal.SIGKILL, "preempted", "SIGTERM")],
)
def test_a_stopped_python_leaves_a_saved_run_and_no_process(
    number: signal.Signals, state: str, reason: str, tmp_path: Path
) -> None:
    with training(tmp_path) as script:
        script.wait_for("step 12/")
        os.kill(script.process.pid, number)
        assert script.wait() == -number
        seconds_until_empty(tmp_path, 10)
    assert ("KeyboardInterrupt" in script.err) == (number is signal.SIGINT)
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["status"], status["reason"]) == (state, reason)
    newest = step_folders(tmp_path / "run" / "checkpoints")[0]
    assert step_of(newest) == status["step"]
    verify(newest)
