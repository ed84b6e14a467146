"""A study on a real Slurm cluster: arrays, a job that dies, and its retry."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.processes import started
from harness.slurm import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STUDY = [
    *("study", "shapes-cnn", "--on=slurm", "--world-sizes=1,2", "--strategies=ddp,fsdp", "--repeats=1"),
    *("--processes-per-node=1", "--cpus-per-task=1", "--time=5:00", "--output-dir=study", "--epochs=2", "--track"),
    *("--num-samples=640", "--global-batch-size=64", "--omp-num-threads=1"),
]


def test_a_dead_job_is_shown_as_failed_and_runs_again_with_retry(cluster: Cluster, tmp_path: Path) -> None:
    conf = str(cluster.conf)
    study, victim = tmp_path / "study", "fsdp-2-r1"

    def is_training() -> bool:
        try:
            return bool(json.loads((study / "cells" / victim / "status.json").read_text())["status"] == "running")
        except (OSError, ValueError, KeyError):
            return False

    with started(*STUDY, cwd=tmp_path, SLURM_CONF=conf) as run:
        cluster.wait_until(is_training, 150, f"{victim} to train")
        # Killed without a message, as if its node was lost: the run's own status is still running.
        job = next(job for job in json.loads((study / "jobs.json").read_text()) if victim in job["cells"])
        task = f"{job['job_id']}_{job['cells'].index(victim)}"
        cluster.run("scancel", "--full", "--signal=KILL", task)
        run.wait_for(f"failed    {victim}", 150)
        run.wait_for("next      the same command with --retry")
        assert run.wait() == 1, run.err
    first = {path.parent.name: path.stat().st_mtime_ns for path in study.glob("cells/*/results.json")}
    assert sorted(first) == ["ddp-1-r1", "ddp-2-r1", "fsdp-1-r1"]

    answer = paceline(*STUDY, "--retry", cwd=tmp_path, SLURM_CONF=conf)
    assert answer.code == 0, answer
    assert "an array of 1 cells, 2 ranks each" in answer.out
    second = {path.parent.name: path.stat().st_mtime_ns for path in study.glob("cells/*/results.json")}
    assert {name: second[name] for name in first} == first  # finished cells did not run again
    with (study / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["gpus"], row["hosts"]) for row in rows] == [
        *(("ddp", "1", "1"), ("ddp", "2", "2")),
        *(("fsdp", "1", "1"), ("fsdp", "2", "2")),
    ]
    assert (study / "report.html").exists()
