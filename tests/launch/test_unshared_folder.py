"""A run folder that the nodes do not share is detected before training, and the start is not retried.

Two nodes on this machine start in different folders. They have two folders of one name, like nodes without shared
storage.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.cli import environment
from harness.short_run import FLAGS
from harness.sockets import port_for_a_gang
from paceline.errors import EXIT_USER
from paceline.runtime.detect import Nodes, agent_variables
from paceline.runtime.secret import RUN_SECRET, create_secret

SIZE = ["--num-samples=160", "--global-batch-size=16", "--epochs=1"]
TRAIN = [*FLAGS[:2], *SIZE, "--output-dir=run"]


def run_nodes(commands: Sequence[Sequence[str]], folders: Sequence[Path], **extra: str) -> list[tuple[int, str, str]]:
    """Run all nodes at once. Returns the exit code and output of each."""
    with ExitStack() as stack:
        nodes = []
        for number, (words, folder) in enumerate(zip(commands, folders, strict=True)):
            folder.mkdir(exist_ok=True)
            variables = {name: value.replace("NODE", str(number)) for name, value in extra.items()}
            node = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=folder,
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            nodes.append(stack.enter_context(node))
            stack.callback(node.kill)
        said = [node.communicate(timeout=200) for node in nodes]
    return [(node.returncode, out, err) for node, (out, err) in zip(nodes, said, strict=True)]


def run_agents(folders: Sequence[Path], *flags: str, **extra: str) -> list[tuple[int, str, str]]:
    variables = agent_variables(Nodes(2, 0, "127.0.0.1", port_for_a_gang()))
    variables = {name: value.replace("0/2@", "NODE/2@") for name, value in variables.items()}
    train = ["paceline", *TRAIN, "--processes=1", *flags]
    return run_nodes([train, train], folders, **variables, **{RUN_SECRET: create_secret()}, **extra)


def trained(folder: Path) -> bool:
    return (folder / "run" / "metrics.jsonl").exists()


def test_agents_of_two_nodes_stop_before_the_first_step(tmp_path: Path) -> None:
    """Node 1 does not see node 0's folder. Both end with a user error in the first attempt, untrained."""
    folders = [tmp_path / "a", tmp_path / "b"]
    first, second = run_agents(folders)
    assert (first[0], second[0]) == (EXIT_USER, EXIT_USER), (first, second)
    assert not any(trained(folder) for folder in folders)
    failure = json.loads((folders[0] / "run" / "failure.json").read_text())
    assert (failure["attempt"], failure["exit_code"]) == (1, EXIT_USER)
    assert str(folders[0] / "run") in first[2]
    assert not list(folders[0].glob("run/**/.shared-*"))
