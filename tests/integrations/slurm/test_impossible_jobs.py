"""A job that a real cluster can never start is refused at once with the cluster's values, and is not in its queue."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.slurm import REQUIRE, Cluster, need_slurm

pytestmark = pytest.mark.slurm

USER = 2
# A refusal takes well below a second of CPU time of this process. The limit has a margin for a busy machine.
MOST_S = 60
MOST_CPU_S = 2
LIMITED = (
    "PartitionName=short Nodes=n[1-2] MaxTime=30 DefaultTime=10 MaxNodes=1",
    "PartitionName=closed Nodes=n1 State=INACTIVE",
    "PartitionName=down Nodes=n1 State=DOWN",
    "PartitionName=lab Nodes=n1 AllowAccounts=lab",
)
JOB = ("shapes-cnn", "--max-steps", "2")
ONE = ("--nodes", "1", "--processes-per-node", "1", "--time", "10")


@pytest.fixture(scope="module")
def limited() -> Iterator[Cluster]:
    need_slurm()
    with Cluster(nodes=2, cpus=4, gpus=2, extra=LIMITED) as cluster:
        yield cluster


def paceline(cluster: Cluster, folder: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder,
        env=cluster.environment(HOME=str(folder), **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


def cancel_jobs(cluster: Cluster) -> None:
    """Also held jobs, in any partition."""
    if jobs := jobs_of(cluster):
        cluster.run("scancel", *jobs)
    cluster.wait_until(lambda: not jobs_of(cluster), 40, "an empty queue")


def jobs_of(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "--noheader", "--format=%i").split()


# The arguments, and the values of the cluster that the screen must name.
IMPOSSIBLE: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "nodes": (("--nodes", "4", "--processes-per-node", "1", "--time", "10"), ["--nodes 4", "1 to 2", "--nodes 2"]),
    "CPUs": ((*ONE, "--cpus-per-task", "5"), ["5 CPUs", "up to 4", "--cpus-per-task 4"]),
    "CPUs of ranks": (("--nodes", "1", "--processes-per-node", "8", "--start", "ranks"), ["8 tasks", "up to 4"]),
    "CPUs of the agent": (("--nodes", "1", "--processes-per-node", "8", "--time", "10"), ["8 CPUs", "up to 4"]),
    "GPUs": (("--nodes", "1", "--gpus-per-node", "4", "--cpus-per-task", "4"), ["--gpus-per-node 4", "gpu 2"]),
    "type of GPU": (("--nodes", "1", "--gpus-per-node", "a100:2", "--cpus-per-task", "2"), ["a100", "gpu 2"]),
    "gres": ((*ONE, "--gres", "fpga:1"), ["fpga"]),
    "memory": ((*ONE, "--mem", "200G"), ["--mem 200G", "100000M"]),
    "feature": ((*ONE, "--constraint", "zen"), ["--constraint zen"]),
    "time": ((*ONE[:-1], "31", "--partition", "short"), ["--time 31", "00:30:00", "--partition main"]),
    "nodes of a job": (
        ("--nodes", "2", "--processes-per-node", "1", "--partition", "short", "--time", "10"),
        ["--nodes 2", "up to 1"],
    ),
    "partition": ((*ONE, "--partition", "shrot"), ["--partition shrot", "main, urgent, short", "--partition short"]),
    "partition without jobs": ((*ONE, "--partition", "closed"), ["INACTIVE", "main"]),
    "account": ((*ONE, "--partition", "lab", "--account", "other"), ["account other", "lab"]),
    "array": ((*ONE, "--array", "0-2000"), ["--array 0-2000", "1000"]),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_job_is_refused_at_once(name: str, limited: Cluster, tmp_path: Path) -> None:
    """One screen with the cluster's own values, no job in the queue, no run folder left."""
    typed, parts = IMPOSSIBLE[name]
    began = time.monotonic()
    code, out, screen = paceline(limited, tmp_path, "submit", "slurm", *JOB, *typed)
    took_s = time.monotonic() - began
    assert code == USER, screen
    assert out == ""
    assert screen.startswith("error: ")
    assert "sbatch refuses" not in screen
    for part in (*parts, "got:", "allowed:", "try:"):
        assert part in screen, screen
    assert took_s < MOST_S
    assert jobs_of(limited) == []
    assert not (tmp_path / "runs").exists()


def test_questions_to_slurm_take_a_fraction_of_a_second(limited: Cluster, tmp_path: Path) -> None:
    """The CPU time of one submission, which a busy machine does not change."""
    program = (
        f"import resource, sys; sys.argv = ['paceline', 'submit', 'slurm', *{[*JOB, *IMPOSSIBLE['nodes'][0]]!r}]\n"
    )
    program += "from paceline.cli.main import main\ncode = main(sys.argv[1:])\n"
    program += "used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
    program += "print(code, sum(one.ru_utime + one.ru_stime for one in used))"
    out = limited.run(sys.executable, "-c", program, cwd=tmp_path, timeout_s=60)
    code, cpu_s = out.split()
    assert int(code) == USER
    assert float(cpu_s) < MOST_CPU_S


def test_a_variable_of_sbatch_is_named(limited: Cluster, tmp_path: Path) -> None:
    """SBATCH_PARTITION has priority over the script, so the user must change the variable."""
    code, _, screen = paceline(
        limited, tmp_path, "submit", "slurm", *JOB, *ONE, "--partition", "main", SBATCH_PARTITION="nix"
    )
    assert code == USER
    assert "unset SBATCH_PARTITION" in screen
    assert jobs_of(limited) == []


@pytest.mark.parametrize(
    "typed",
    [
        ONE,
        (*ONE, "--partition", "short,main"),
        (*ONE[:-1], "60", "--partition", "short,main"),
        (*ONE, "--account", "any", "--qos", "any"),
        (*ONE, "--sbatch", "--exclusive", "--mem", "0"),
        ("--nodes", "2", "--gpus-per-node", "2", "--cpus-per-task", "4", "--device", "auto", "--time", "10"),
    ],
    ids=["plain", "partitions", "one partition fits", "no accounting", "exclusive", "all GPUs"],
)
def test_a_possible_job_is_submitted(typed: tuple[str, ...], limited: Cluster, tmp_path: Path) -> None:
    """The check does not refuse jobs that this cluster starts. --hold: the job only has to be accepted."""
    code, out, screen = paceline(limited, tmp_path, "submit", "slurm", *JOB, *typed, "--sbatch", "--hold")
    try:
        assert code == 0, screen
        assert "is in the queue" in out
        assert len(jobs_of(limited)) == 1
    finally:
        cancel_jobs(limited)


def test_a_partition_that_is_down_takes_the_job_with_a_warning(limited: Cluster, tmp_path: Path) -> None:
    """It opens again after maintenance, so the job is not refused."""
    code, out, screen = paceline(limited, tmp_path, "submit", "slurm", *JOB, *ONE, "--partition", "down")
    try:
        assert code == 0, screen
        assert "partition down is down" in screen
        assert "is in the queue" in out
    finally:
        cancel_jobs(limited)


def test_a_study_is_refused_before_its_first_job(limited: Cluster, tmp_path: Path) -> None:
    """The cell with the most nodes is impossible: no job is submitted."""
    study = ("study", *JOB, "--on", "slurm", "--world-sizes", "1,2,4", "--processes-per-node", "1", "--time", "10")
    code, _, screen = paceline(limited, tmp_path, *study)
    assert code == USER, screen
    assert "1 to 2" in screen
    assert "--world-sizes" in screen
    assert jobs_of(limited) == []
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--nodes", "4"), "1 to 2"),
        (("--nodes", "2", "--processes", "5"), "up to 4"),
        (("--nodes", "1", "--", "--partition=nix"), "--partition nix"),
        (("--nodes", "1", "--", "--gpus-per-node=3"), "gpu 2"),
    ],
)
def test_doctor_does_not_wait_for_an_impossible_job(
    words: tuple[str, ...], part: str, limited: Cluster, tmp_path: Path
) -> None:
    """The same check before srun, which would wait in the queue."""
    code, out, screen = paceline(limited, tmp_path, "doctor", "--launch", "slurm", *words)
    assert code == USER, screen
    assert out == ""
    assert part in screen
    assert "try:" in screen
    assert jobs_of(limited) == []


def test_status_says_that_a_waiting_job_cannot_start(limited: Cluster, tmp_path: Path) -> None:
    """A limit that was lowered after the job was submitted."""
    typed = (*ONE[:-1], "20", "--partition", "short", "--output-dir", "run", "--sbatch", "--hold")
    code, _, screen = paceline(limited, tmp_path, "submit", "slurm", *JOB, *typed)
    assert code == 0, screen
    job = jobs_of(limited)[0]
    try:
        limited.run("scontrol", "update", "PartitionName=short", "MaxTime=5")
        limited.run("scontrol", "release", job)
        limited.wait_until(lambda: limited.job(job)["Reason"] == "PartitionTimeLimit", 30, "PartitionTimeLimit")
        code, out, screen = paceline(limited, tmp_path, "status", "run")
        assert code == 0, screen
        assert "will not start by itself" in out
        assert "--time" in out
    finally:
        limited.run("scontrol", "update", "PartitionName=short", "MaxTime=30")
        cancel_jobs(limited)


def test_a_refusal_of_sbatch_has_a_next_step(limited: Cluster, tmp_path: Path) -> None:
    """For errors that only sbatch finds: here a list of nodes that do not exist."""
    code, _, screen = paceline(limited, tmp_path, "submit", "slurm", *JOB, *ONE, "--sbatch", "--nodelist=n9")
    assert code == USER
    assert "sbatch refuses the job" in screen
    assert "try:     sinfo" in screen


# --- With accounting --------------------------------------------------------------------------------------------------

ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")


@pytest.fixture(scope="module")
def counted() -> Iterator[Cluster]:
    """Root has the accounts lab and root. lab may run for a day and has no QOS long."""
    need_slurm()
    missing = [name for name in ACCOUNTING if shutil.which(name) is None]
    if missing:
        reason = (
            f"not installed: {', '.join(missing)} (make slurm-install SLURM_PACKAGES='slurmdbd mariadb-server-core')"
        )
        if os.environ.get(REQUIRE, "") not in ("", "0"):
            pytest.fail(f"{reason}, and {REQUIRE} is set")
        pytest.skip(reason)
    enforce = "AccountingStorageEnforce=associations,limits,qos"
    with Cluster(
        nodes=2, cpus=4, accounting=True, extra=(enforce, "PartitionName=lab Nodes=n1 AllowAccounts=lab")
    ) as c:
        for words in (
            "add qos long",
            "add account lab Description=lab Organization=lab",
            "add user root Account=lab",
            "modify user root where account=lab set MaxWall=1-00:00:00",
        ):
            c.run("sacctmgr", "--immediate", *words.split())
        yield c


RIGHTS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "account": ((*ONE, "--account", "lba"), ["--account lba", "lab, root", "--account lab"]),
    "QOS that is not there": ((*ONE, "--qos", "logn"), ["--qos logn", "normal, long", "--qos long"]),
    "QOS of others": ((*ONE, "--qos", "long"), ["--qos long", "normal"]),
    "account in partition": ((*ONE, "--account", "root", "--partition", "lab"), ["account root", "lab"]),
    "time of the account": ((*ONE[:-1], "2-00:00:00", "--account", "lab"), ["2-00:00:00", "up to 1-00:00:00"]),
}


@pytest.mark.parametrize("name", RIGHTS)
def test_an_account_or_qos_that_cannot_be_used_is_refused(name: str, counted: Cluster, tmp_path: Path) -> None:
    """By the user's own associations."""
    typed, parts = RIGHTS[name]
    code, _, screen = paceline(counted, tmp_path, "submit", "slurm", *JOB, *typed)
    assert code == USER, screen
    assert "sbatch refuses" not in screen
    for part in parts:
        assert part in screen, screen
    assert jobs_of(counted) == []


def test_a_job_with_a_right_account_is_submitted(counted: Cluster, tmp_path: Path) -> None:
    """Also in a partition that allows only this account."""
    typed = (*ONE, "--account", "lab", "--partition", "lab", "--qos", "normal", "--sbatch", "--hold")
    try:
        code, out, screen = paceline(counted, tmp_path, "submit", "slurm", *JOB, *typed)
        assert code == 0, screen
        assert "is in the queue" in out
    finally:
        cancel_jobs(counted)
