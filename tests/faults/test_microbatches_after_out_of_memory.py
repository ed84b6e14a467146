"""After an out-of-memory error, the microbatches of all ranks on all nodes become smaller. The result is the same."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.cli import environment, paceline
from harness.runs import read_results, step_losses
from harness.short_run import injected_faults
from paceline.runtime.detect import Nodes, agent_variables

# Ten samples per rank: a quarter of them is not a whole number.
TRAIN = [
    *("train", "shapes-cnn", "--num-samples=300", "--global-batch-size=20", "--epochs=1", "--log-frequency=1"),
    *("--track", "--save-steps=5", "--output-dir=run", "--auto-microbatch"),
]
MEMORY = "--inject=oom rank=1 step=7 above=3 times=9"
# Float sums in another order. Over 13 steps the difference stays below this.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    answer = paceline(*TRAIN, "--processes=2", cwd=folder)
    assert answer.code == 0, answer
    return step_losses(folder / "run")


@pytest.mark.faults
def test_a_batch_that_four_does_not_divide_is_split_into_five(tmp_path: Path, undisturbed: list[float]) -> None:
    """At most three of ten samples fit into memory: five microbatches of two. No loss changes."""
    answer = paceline(*TRAIN, "--processes=2", MEMORY, cwd=tmp_path)
    assert answer.code == 0, answer
    assert len(injected_faults(tmp_path / "run")) == 2  # of ten, and of five
    assert "accumulate: 5" in (tmp_path / "run" / "config.yaml").read_text()
    assert step_losses(tmp_path / "run") == pytest.approx(undisturbed, abs=TOLERANCE)


@pytest.mark.faults
def test_the_ranks_of_all_nodes_use_the_smaller_microbatch(tmp_path: Path, undisturbed: list[float]) -> None:
    """Only the node of the failed rank knows why the attempt ended. The ranks agree at the next start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    secret = secrets.token_hex(32)
    with ExitStack() as stack:
        nodes = []
        for number in range(2):
            variables = agent_variables(Nodes(2, number, "127.0.0.1", port))
            log = stack.enter_context((tmp_path / f"node-{number}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *TRAIN, "--processes=1", MEMORY],
                cwd=tmp_path,
                env=environment(**variables, PYTHONUNBUFFERED="1", PACELINE_RUN_SECRET=secret),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(process.kill)
            nodes.append(process)
        codes = [process.wait(timeout=150) for process in nodes]
    logs = [(tmp_path / f"node-{number}.log").read_text() for number in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    assert read_results(tmp_path / "run")["world_size"] == 2
    assert "accumulate: 5" in (tmp_path / "run" / "config.yaml").read_text()
    assert step_losses(tmp_path / "run") == pytest.approx(undisturbed, abs=TOLERANCE)
