"""Jobs on a real Slurm cluster, submitted by `paceline submit slurm`. Faults do not change their result."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.cli import Answer, command, paceline
from harness.short_run import outcome, read_failures
from harness.slurm import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

RUN = [
    *("shapes-cnn", "--num-samples=1480", "--global-batch-size=64", "--epochs=2", "--log-frequency=1", "--track"),
    *("--save-steps=5", "--omp-num-threads=1", "--output-dir=run"),
]
PLACE = ["--nodes=2", "--processes-per-node=2", "--cpus-per-task=2", "--time=10:00", "--signal-notice-s=60"]
LONG = "--inject=slow rank=0 step=1 steps=40 seconds=0.15"  # slow enough to be disturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The same run on this machine. Its four ranks add like ranks of several nodes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    answer = paceline("train", *RUN, "--processes=4", cwd=folder, PACELINE_NODE_MEMORY="off")
    assert answer.code == 0, answer
    return outcome(folder / "run")


def submit(cluster: Cluster, folder: Path, *flags: str) -> str:
    """Submit the run. Returns the job's id."""
    answer = ask(cluster, folder, "submit", "slurm", *RUN, *PLACE, *flags)
    assert answer.code == 0, answer
    job_id: str = json.loads((folder / "run" / "job.json").read_text())["job_id"]
    return job_id


def ask(cluster: Cluster, folder: Path, *arguments: str) -> Answer:
    return paceline(*arguments, cwd=folder, SLURM_CONF=str(cluster.conf))


def log_of(folder: Path, job_id: str) -> str:
    path = folder / "run" / "logs" / f"slurm-{job_id}.log"
    return path.read_text() if path.exists() else ""


def wait_for_step(cluster: Cluster, folder: Path, step: int, timeout_s: float = 90) -> None:
    status = folder / "run" / "status.json"

    def arrived() -> bool:
        try:
            return bool(json.loads(status.read_text()).get("step", 0) >= step)
        except (OSError, ValueError):
            return False

    cluster.wait_until(arrived, timeout_s, f"step {step}")


def wait_for_end(cluster: Cluster, folder: Path, job_id: str, timeout_s: float = 150) -> dict[str, Any]:
    """Wait until the job has completed. If it fails, the error has the end of its log."""
    try:
        cluster.wait_for_state(job_id, "COMPLETED", timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log_of(folder, job_id)}") from error
    status: dict[str, Any] = json.loads((folder / "run" / "status.json").read_text())
    assert status["status"] == "finished", log_of(folder, job_id)
    return status


@pytest.mark.parametrize("start", ["agent", "ranks", "torchrun"])
def test_all_ways_to_start_give_the_losses_of_one_machine(
    start: str, cluster: Cluster, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    job_id = submit(cluster, tmp_path, f"--start={start}")
    wait_for_end(cluster, tmp_path, job_id)
    assert outcome(tmp_path / "run") == undisturbed
    if start == "agent":
        again = ask(cluster, tmp_path, "submit", "slurm", *RUN, *PLACE)
        assert again.code == 0, again
        assert "finished" in again.out
        assert json.loads((tmp_path / "run" / "job.json").read_text())["job_id"] == job_id


def test_killed_ranks_and_a_warning_before_the_limit(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    """Ranks on both nodes die and are restarted inside the allocation. Then the job gets a warning and is requeued."""
    job_id = submit(cluster, tmp_path, f"{LONG}; kill rank=3 step=7; kill rank=0 step=12")
    wait_for_step(cluster, tmp_path, 18)
    assert [failure["rank"] for failure in read_failures(tmp_path / "run")] == [3, 0]
    assert cluster.job(job_id)["Restarts"] == "0"
    cluster.run("scancel", "--signal=USR1", job_id)  # like --signal before the time limit
    cluster.wait_until(lambda: cluster.job(job_id)["Restarts"] == "1", 60, "a requeue")
    stopped = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (stopped["status"], stopped["reason"]) == ("preempted", "SIGUSR1")
    assert f"Slurm job {job_id} is back in the queue" in log_of(tmp_path, job_id)
    wait_for_end(cluster, tmp_path, job_id)
    assert f"resumed   at step {stopped['step']}" in log_of(tmp_path, job_id)
    assert outcome(tmp_path / "run") == undisturbed


def test_power_loss_moves_the_job_to_a_spare_node(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    job_id = submit(cluster, tmp_path, LONG)
    wait_for_step(cluster, tmp_path, 12)
    lost = cluster.job_nodes(job_id)[1]
    cluster.power_off(lost)
    cluster.wait_until(lambda: cluster.job(job_id)["Restarts"] == "1", 90, "a requeue")
    wait_for_end(cluster, tmp_path, job_id)
    assert lost not in cluster.job_nodes(job_id)
    assert outcome(tmp_path / "run") == undisturbed


def test_a_cut_link_does_not_hang_the_job(cluster: Cluster, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    job_id = submit(cluster, tmp_path, LONG, "--hang-timeout-s=5")
    wait_for_step(cluster, tmp_path, 12)
    lost = cluster.job_nodes(job_id)[1]
    cluster.cut_link(lost)
    cluster.wait_until(lambda: cluster.job(job_id)["Restarts"] == "1", 120, "a requeue")
    wait_for_end(cluster, tmp_path, job_id)
    assert outcome(tmp_path / "run") == undisturbed


def agents_of(folder: Path) -> list[int]:
    """The supervisors of the job: children of Slurm's step daemon on this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            is_task = "slurmstepd" in (Path("/proc") / parent / "comm").read_text()
        except (OSError, IndexError):
            continue
        if is_task and str(folder / "run") in words and "paceline" in words:
            found.append(int(entry.name))
    return sorted(found)


def test_a_killed_agent_causes_a_requeue(cluster: Cluster, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    job_id = submit(cluster, tmp_path, LONG)
    wait_for_step(cluster, tmp_path, 12)
    agents = agents_of(tmp_path)
    assert len(agents) == 2
    os.kill(agents[1], signal.SIGKILL)
    cluster.wait_until(lambda: cluster.job(job_id)["Restarts"] == "1", 60, "a requeue")
    wait_for_end(cluster, tmp_path, job_id)
    assert outcome(tmp_path / "run") == undisturbed


def test_a_requeue_by_hand_and_a_cancelled_job(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    job_id = submit(cluster, tmp_path, LONG)
    wait_for_step(cluster, tmp_path, 7)
    cluster.run("scontrol", "requeue", job_id)
    wait_for_step(cluster, tmp_path, 15)
    refused = ask(cluster, tmp_path, "submit", "slurm", *RUN, *PLACE)
    assert refused.code == 2, refused
    assert job_id in refused.err
    assert ask(cluster, tmp_path, "cancel", "run").code == 0
    cluster.wait_for_state(job_id, "CANCELLED", 60)
    began = time.monotonic()
    while time.monotonic() - began < 5:  # it must not be requeued by itself
        assert cluster.job_state(job_id) == "CANCELLED"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "preempted"
    again = submit(cluster, tmp_path, LONG, "--resume=auto")
    assert again != job_id
    wait_for_end(cluster, tmp_path, again)
    assert outcome(tmp_path / "run") == undisturbed


def test_wrong_ways_to_start_are_reported_quickly(cluster: Cluster, tmp_path: Path) -> None:
    """The tasks detect it, and the message has the right line."""
    base = ["srun", "--nodes=2", "--ntasks-per-node=2", "--chdir", str(tmp_path)]
    train = [sys.executable, "-m", "paceline", "train", *RUN]
    agents = command(*base, "env", "PACELINE_START=agent", *train, cwd=tmp_path, env=cluster.environment())
    assert agents.code == 2, agents
    assert "srun --ntasks-per-node=1" in agents.err
    wrong = command(*base, *train, "--processes=2", cwd=tmp_path, env=cluster.environment())
    assert wrong.code == 2, wrong
    assert "another number of ranks than asked for" in wrong.err


@pytest.mark.parametrize("start", ["agent", "ranks"])
def test_ranks_use_the_cpus_of_their_allocation_if_the_site_binds_none(
    start: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Two nodes with one granted CPU per rank: one thread per rank, although every task sees all cores of its node."""
    flags = [word for word in RUN if not word.startswith("--omp-num-threads")]
    place = ["--nodes=2", "--processes-per-node=1", "--cpus-per-task=1", "--time=10:00", f"--start={start}"]
    answer = ask(cluster, tmp_path, "submit", "slurm", *flags, *place)
    assert answer.code == 0, answer
    wait_for_end(cluster, tmp_path, json.loads((tmp_path / "run" / "job.json").read_text())["job_id"])
    assert len(os.sched_getaffinity(0)) > 1  # as many as a task sees on this cluster
    ranks = json.loads((tmp_path / "run" / "results.json").read_text())["process_metrics"]
    assert [rank["threads"] for rank in ranks] == [1, 1]
