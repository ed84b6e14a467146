"""Ranks of torchrun on two nodes that do not share the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.sockets import free_port
from launch.test_unshared_folder import TRAIN, run_nodes, trained

pytestmark = pytest.mark.faults


def run_torchrun(folders: Sequence[Path]) -> list[tuple[int, str, str]]:
    port = free_port()
    launch = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    commands = [
        [*launch, f"--master-port={port}", f"--node-rank={node}", "-m", "paceline", *TRAIN] for node in range(2)
    ]
    return run_nodes(commands, folders)


def test_ranks_of_torchrun_on_two_nodes_stop_before_the_first_step(tmp_path: Path) -> None:
    """The same check without our supervisor."""
    folders = [tmp_path / "a", tmp_path / "b"]
    ends = run_torchrun(folders)
    assert all(end[0] != 0 for end in ends), ends
    assert not any(trained(folder) for folder in folders)
    assert str(folders[0] / "run") in ends[0][2]
    assert ends[0][2].count("error: ") == 1, ends[0][2]
