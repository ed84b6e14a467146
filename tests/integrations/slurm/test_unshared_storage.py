"""Nodes of a real cluster without a shared folder or without python: detected in seconds, named, not requeued."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import Answer, paceline
from harness.slurm import FINAL_STATES, Cluster
from paceline.errors import EXIT_USER

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TRAIN = ["shapes-cnn", "--num-samples=320", "--global-batch-size=32", "--epochs=1", "--track", "--omp-num-threads=1"]
PLACE = ["--nodes=2", "--processes-per-node=2", "--cpus-per-task=2", "--time=10:00", "--signal-notice-s=60"]


def submit(cluster: Cluster, home: Path, *flags: str) -> Answer:
    return paceline("submit", "slurm", *TRAIN, *PLACE, *flags, cwd=home, SLURM_CONF=str(cluster.conf))


def end_of(cluster: Cluster, run: Path) -> tuple[dict[str, str], str]:
    """Slurm's final state of the job, and its log."""
    job_id = json.loads((run / "job.json").read_text())["job_id"]
    cluster.wait_until(lambda: cluster.job_state(job_id) in FINAL_STATES, 150, f"the end of job {job_id}")
    log = run / "logs" / f"slurm-{job_id}.log"
    return cluster.job(job_id), log.read_text() if log.exists() else ""


def require_failed_once(job: dict[str, str], log: str) -> None:
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", f"{EXIT_USER}:0", "0"), log


@pytest.mark.parametrize("start", ["agent", "ranks", "torchrun"])
def test_a_home_folder_that_is_not_shared_ends_the_job_before_training(
    start: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Exit code 2, not requeued, no training. The log names the node and the folder."""
    home = tmp_path / "home"
    home.mkdir()
    with cluster.unshared(home, "n2"):
        answer = submit(cluster, home, f"--start={start}", "--output-dir=run")
        assert answer.code == 0, answer
        job, log = end_of(cluster, home / "run")
    require_failed_once(job, log)
    assert not (home / "run" / "metrics.jsonl").exists()
    assert "node n2 does not see the folder of node n1" in log
    assert str(home / "run") in log
    assert [path.name for path in (home / "run").rglob(".*") if path.is_file()] == []


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_venv_that_is_missing_on_a_node_ends_the_job_at_once(node: str, cluster: Cluster, tmp_path: Path) -> None:
    """On the first node the batch script detects it, on the second the task of srun."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f"export PATH={venv}/bin:$PATH\n")
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    with cluster.unshared(venv, node):
        answer = submit(cluster, tmp_path, f"--venv={venv}", "--output-dir=run")
        assert answer.code == 0, answer
        job, log = end_of(cluster, tmp_path / "run")
    require_failed_once(job, log)
    assert f"paceline cannot start on node {node}" in log
    assert str(venv / "bin") in log


def examine(cluster: Cluster, *flags: str, cwd: Path, python: str = sys.executable) -> dict[str, Any]:
    command = [python, "-m", "paceline", "doctor", "--launch=slurm", "--nodes=2", "--json", *flags]
    content: dict[str, Any] = json.loads(cluster.run(*command, cwd=cwd, check=False, timeout_s=200))
    content["by_name"] = {finding["name"]: finding for finding in content["findings"]}
    return content


@pytest.mark.parametrize("nodes", [("n2",), ("n1", "n2", "n3")], ids=["one-node", "all-but-the-login-node"])
def test_doctor_finds_a_home_folder_that_is_not_shared(
    nodes: tuple[str, ...], cluster: Cluster, tmp_path: Path
) -> None:
    """Also if the nodes share it with each other, but not with the submitting machine."""
    home = tmp_path / "home"
    home.mkdir()
    with cluster.unshared(home, *nodes):
        content = examine(cluster, cwd=home)
    assert content["healthy"] is False
    shared = content["by_name"]["shared folder"]
    assert shared["status"] == "fail"
    assert shared["nodes"] == [node for node in nodes if node != "n3"]
    assert str(home) in shared["what"]
    assert not list(home.glob(".shared-*"))


def test_doctor_passes_with_a_shared_folder(cluster: Cluster, tmp_path: Path) -> None:
    """The check can pass."""
    content = examine(cluster, cwd=tmp_path)
    assert content["by_name"]["shared folder"]["status"] == "pass"
    assert not list(tmp_path.glob(".shared-*"))


def test_doctor_names_the_node_without_the_python(cluster: Cluster, tmp_path: Path) -> None:
    """The doctor's own python is missing on one node."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").write_text((Path(sys.executable).parent.parent / "pyvenv.cfg").read_text())
    (tmp_path / "lib").symlink_to(Path(sys.prefix) / "lib")
    with cluster.unshared(folder, "n2"):
        content = examine(cluster, cwd=tmp_path, python=str(folder / "python"))
    assert content["healthy"] is False
    python = content["by_name"]["installation"]
    assert (python["status"], python["nodes"]) == ("fail", ["n2"])
    assert str(folder / "python") in python["what"]
