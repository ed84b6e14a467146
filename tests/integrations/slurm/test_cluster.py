"""The test cluster itself: it is real, its faults are real, and it leaves no files or processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness.slurm import REQUIRE, SCRIPTS, Cluster, need_slurm, why_no_slurm

pytestmark = pytest.mark.slurm


def script(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


def left_behind(state: Path) -> list[str]:
    """Processes, links, mounts and files of the cluster in this folder."""
    mark = f"PACELINE_SLURM_CLUSTER={state}"
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(f"process {entry.name}: {(entry / 'comm').read_text().strip()}")
        except OSError:
            continue
    found += [
        f"link {path.parent.name}" for path in Path("/sys/class/net").glob("*/ifalias") if mark in path.read_text()
    ]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{state}/" in line]
    return found + ([f"folder {state}"] if state.exists() else [])


def test_two_nodes_are_two_machines(cluster: Cluster) -> None:
    report = 'echo "$(hostname) $(cat /proc/sys/kernel/hostname) $CUDA_VISIBLE_DEVICES $(ip -4 -o addr show eth0)"'
    lines = cluster.run("srun", "--nodes=2", "--gpus-per-node=2", "bash", "-c", report).splitlines()

    names, kernels, gpus, addresses = zip(*(sorted(lines)[i].split(None, 3) for i in range(2)), strict=True)
    assert names == kernels == ("n1", "n2")
    assert gpus == ("0,1", "0,1")
    assert len(set(addresses)) == 2


def test_nodes_reach_each_other_by_name_and_share_no_memory(cluster: Cluster) -> None:
    words = "echo $SLURMD_NODENAME >/dev/shm/name; getent hosts n1 n2 >/dev/null && ls /dev/shm; cat /dev/shm/name"
    lines = cluster.run("srun", "--nodes=2", "bash", "-c", words).split()
    assert sorted(lines) == ["n1", "n2", "name", "name"]


def test_power_loss_requeues_the_job_onto_the_spare(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(
        "srun hostname; if [ -z $SLURM_RESTART_COUNT ]; then sleep 300; fi", "--nodes=2", "--requeue", cwd=tmp_path
    )
    cluster.wait_for_state(job, "RUNNING")
    assert cluster.job_nodes(job) == ["n1", "n2"]

    cluster.power_off("n2")

    cluster.wait_for_state(job, ("PENDING", "REQUEUED"), timeout_s=30)
    cluster.wait_for_state(job, "COMPLETED", timeout_s=40)
    assert cluster.job(job)["Restarts"] == "1"
    assert cluster.job_nodes(job) == ["n1", "n3"]
    assert sorted((tmp_path / f"out-{job}.txt").read_text().split()[-2:]) == ["n1", "n3"]
    cluster.boot("n2")
    assert cluster.node_state("n2") == "idle"


def test_a_cut_link_is_detected_and_restored(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("sleep 300", "--nodelist=n3", "--no-requeue", cwd=tmp_path)
    cluster.wait_for_state(job, "RUNNING")
    before = cluster.host_pid("n3")

    cluster.cut_link("n3")
    cluster.wait_for_node("n3", ("down*", "down"))
    assert cluster.wait_for_state(job, "NODE_FAIL") == "NODE_FAIL"

    cluster.restore_link("n3")
    cluster.wait_for_node("n3", "idle")
    assert cluster.host_pid("n3") == before, "the processes of the node continue"


def test_a_short_reboot_ends_the_jobs_of_the_node(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("sleep 300", "--nodelist=n1", "--no-requeue", cwd=tmp_path)
    cluster.wait_for_state(job, "RUNNING")
    cluster.power_off("n1")
    cluster.boot("n1")
    assert cluster.wait_for_state(job, "NODE_FAIL", timeout_s=10) == "NODE_FAIL"
    assert cluster.node_state("n1") == "idle"


def test_a_rebooted_node_keeps_its_mac_address(cluster: Cluster) -> None:
    """With another address n1 would send to the old one for half a minute, and srun would not start its tasks."""

    def card() -> str:
        return cluster.run("srun", "--nodelist=n2", "ip", "-brief", "link", "show", "eth0").split()[2]

    before = card()
    cluster.power_off("n2")
    cluster.boot("n2")
    assert card() == before
    assert sorted(cluster.run("srun", "--nodes=2", "--nodelist=n1,n2", "hostname").split()) == ["n1", "n2"]


def test_a_lost_controller_blocks_no_test_and_can_be_restarted(cluster: Cluster) -> None:
    cluster.power_off("ctl")
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run("squeue", timeout_s=1)
    cluster.boot("ctl")
    assert sorted(cluster.run("srun", "--nodes=3", "hostname").split()) == ["n1", "n2", "n3"]


def test_two_clusters_run_side_by_side_and_leave_nothing() -> None:
    need_slurm()
    with Cluster(nodes=1) as one, Cluster(nodes=1) as other:
        assert one.run("srun", "hostname") == other.run("srun", "hostname") == "n1\n"
        assert one.run("scontrol", "ping") != ""
        assert one.conf.read_text() != other.conf.read_text()
        assert (one.state / "munge.key").stat().st_mode & 0o777 == 0o600
        one.down()
        assert left_behind(one.state) == []
        assert other.run("srun", "hostname") == "n1\n"
    assert left_behind(other.state) == []


def test_down_cleans_up_after_a_killed_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    need_slurm()
    # Killed at several times: before the bridge, between bridge and daemons, during the start of the daemons.
    for moment_s in (0.02, 0.05, 0.1, 0.2):
        state = Path(f"/tmp/slurm-cut-{os.getpid()}")
        with subprocess.Popen([str(SCRIPTS / "up"), str(state)], start_new_session=True) as up:
            time.sleep(moment_s)  # not a synchronisation: any time is valid
            os.killpg(up.pid, signal.SIGKILL)
        assert script("down", str(state)).returncode == 0
        assert left_behind(state) == []
        assert not list(Path("/sys/class/net").glob(f"pace-{up.pid}"))


def test_mistakes_are_reported_and_leave_nothing(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for words, said in {
        ("up", "/tmp/x" * 20): "characters",
        ("up", "/tmp/with space"): "letters",
        ("up", str(tmp_path)): "folder of its own" if len(str(tmp_path)) <= 60 else "characters",
        ("up", "/tmp/slurm-none", "--nodes", "0"): "from 1 to 200",
        ("up", str(cluster.state), "--nodes", "7"): "down",
        ("node", str(cluster.state), "off", "n9"): "n1 n2 n3",
        ("node", "/tmp/slurm-none", "off", "n1"): "no cluster",
    }.items():
        answer = script(*words)
        assert answer.returncode == 2, words
        assert said in answer.stderr, words
    assert script("down", str(tmp_path)).returncode == 0
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not Path("/tmp/slurm-none").exists()


def test_without_slurm_tests_skip_and_in_ci_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_no_slurm(path=str(tmp_path))
    assert reason is not None
    assert "make slurm-install" in reason or "root" in reason
    monkeypatch.delenv(REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"make slurm-install|root"):
        need_slurm(path=str(tmp_path))
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match=REQUIRE):
        need_slurm(path=str(tmp_path))
