"""Two tasks of srun on two nodes have the losses and the weights of two processes on one machine, bit for bit.

The other launchers: tests/integrations/test_conformance.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.runnable_pipelines import STEPS, TINY_FLAGS
from harness.runs import read_results, step_losses
from harness.short_run import outcome
from harness.slurm import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_srun_gives_the_losses_and_weights_of_paceline_train(cluster: Cluster, tmp_path: Path) -> None:
    local = paceline("train", *TINY_FLAGS, "--processes=2", "--output-dir=alone", cwd=tmp_path)
    assert local.code == 0, local
    task = (sys.executable, "-m", "paceline", "train", *TINY_FLAGS, "--output-dir=run")
    out = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *task, cwd=tmp_path, timeout_s=200)
    assert "2 ranks on 2 nodes by srun" in out
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert len(step_losses(alone)) == STEPS
    assert step_losses(run) == step_losses(alone)
    for name in ("weights_sha256", "optimizer_sha256", "test_loss", "world_size"):
        assert read_results(run)[name] == read_results(alone)[name]
    assert outcome(run) == outcome(alone)
