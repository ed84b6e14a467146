"""`paceline.train` is interrupted, or killed with its Python process: the run is saved and no process remains."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from harness.processes import seconds_until_empty, started
from harness.short_run import read_json
from paceline.checkpoints.format import step_folders, step_of, verify

pytestmark = pytest.mark.faults
SCRIPT = """
import paceline
paceline.train(epochs=50, num_samples=640, global_batch_size=64, log_frequency=1, track=(), output_dir="run")
"""


@pytest.mark.parametrize(
    ("number", "state", "reason"),
    [(signal.SIGINT, "stopped", "interrupted by the user"), (signal.SIGKILL, "preempted", "SIGTERM")],
)
def test_a_stopped_python_leaves_a_saved_run_and_no_process(
    number: signal.Signals, state: str, reason: str, tmp_path: Path
) -> None:
    with started(cwd=tmp_path, launcher=("-c", SCRIPT)) as script:
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
