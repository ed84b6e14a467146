"""docs/guides/slurm-cluster.md: its files work with the real daemons and protect their secrets."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.slurm import Cluster, need_slurm

pytestmark = pytest.mark.slurm

HERE = Path(__file__).parent
FILES = HERE.parents[2] / "examples" / "slurm" / "cluster"
GUIDE = HERE.parents[2] / "docs" / "guides" / "slurm-cluster.md"


def run(*command: str, timeout_s: float = 60) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def controller(tmp_path: Path) -> Path:
    need_slurm()
    run(str(FILES / "setup-controller"), "--dest", str(tmp_path / "ctl"))
    return tmp_path / "ctl"


@pytest.fixture
def node(controller: Path, tmp_path: Path) -> Path:
    (tmp_path / "bundle").mkdir()
    run("tar", "-xf", str(controller / "root/slurm-node.tar"), "-C", str(tmp_path / "bundle"))
    run(str(tmp_path / "bundle/setup-node"), "--dest", str(tmp_path / "node"))
    return tmp_path / "node"


def test_only_the_owners_can_read_the_secrets(controller: Path, node: Path) -> None:
    modes = {
        controller / "etc/munge": 0o700,
        controller / "etc/munge/munge.key": 0o400,
        controller / "etc/slurm/slurmdbd.conf": 0o600,
        controller / "root/slurm-node.tar": 0o600,
        node / "etc/munge": 0o700,
        node / "etc/munge/munge.key": 0o400,
    }
    assert {path: mode(path) for path in modes} == modes
    assert (controller / "etc/munge/munge.key").owner() == "munge"
    assert (controller / "etc/slurm/slurmdbd.conf").owner() == "slurm"
    assert (controller / "etc/munge/munge.key").read_bytes() == (node / "etc/munge/munge.key").read_bytes()

    password = re.search(r"^StoragePass=(.{30,})$", (controller / "etc/slurm/slurmdbd.conf").read_text(), re.M)
    assert password is not None
    secrets = (password[1].encode(), (controller / "etc/munge/munge.key").read_bytes())
    for root in (controller, node):
        for path in root.rglob("*"):
            if path.is_file() and mode(path) & 0o077:
                assert not any(secret in path.read_bytes() for secret in secrets), path


def test_a_second_setup_keeps_the_secrets_and_applies_changes(controller: Path, tmp_path: Path) -> None:
    kept = ("etc/munge/munge.key", "etc/slurm/slurmdbd.conf")
    before = [(controller / name).read_bytes() for name in kept]
    (controller / "etc/slurm/slurm.conf").write_text("old")
    run(str(FILES / "setup-controller"), "--dest", str(controller))
    assert [(controller / name).read_bytes() for name in kept] == before
    assert (controller / "etc/slurm/slurm.conf").read_text() == (FILES / "slurm.conf").read_text()


def test_a_node_has_its_gpus_before_slurmd_starts(node: Path) -> None:
    """slurmd ends if a device file of gres.conf is missing, so the driver is loaded first at boot."""
    unit = (node / "etc/systemd/system/slurmd.service.d/gpu.conf").read_text()
    assert "After=nvidia-persistenced.service" in unit.splitlines()
    assert "ExecStartPre=/usr/bin/nvidia-smi --list-gpus" in unit.splitlines()
    assert "pam_slurm_adopt.so" in (node / "etc/slurm/pam-sshd").read_text()


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    """/home with two users and a link, and the folder to share."""
    need_slurm()
    home, shared = tmp_path / "home", tmp_path / "srv"
    for number, name in ((2001, "ada"), (2002, "grace")):
        (home / name / ".ssh").mkdir(parents=True)
        (home / name / ".ssh" / "key").write_text(name)
        (home / name / "link").symlink_to(".ssh/key")
        for path in (home / name, home / name / ".ssh", home / name / ".ssh" / "key"):
            shutil.chown(path, number, number)
            path.chmod(0o700)
    return home, shared


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(folder)): (path.lstat().st_uid, path.lstat().st_mode) for path in folder.rglob("*")}


def test_existing_home_folders_are_moved_and_not_hidden(homes: tuple[Path, Path]) -> None:
    """Owners, rights and links are kept. The old folders stay visible. A second start changes nothing."""
    home, shared = homes
    before = listing(home)
    run(str(FILES / "move-homes"), str(home), str(shared))
    assert listing(shared) == before
    assert listing(home.with_name("home.before-cluster")) == before
    assert list(home.iterdir()) == []
    assert (shared / "ada" / "link").read_text() == "ada"
    assert "nothing to move" in run(str(FILES / "move-homes"), str(home), str(shared))
    assert listing(shared) == before


def test_after_the_mount_nothing_is_moved(homes: tuple[Path, Path]) -> None:
    """The script may be run again at any time."""
    home, shared = homes
    home.rename(shared)
    home.mkdir()
    script = f"mount --bind {shared} {home} && {FILES / 'move-homes'} {home} {shared}"
    assert "mounted" in run("unshare", "--mount", "bash", "-c", script)
    other = f"mount -t tmpfs none {home} && {FILES / 'move-homes'} {home} {shared}"
    done = subprocess.run(["unshare", "--mount", "bash", "-c", other], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a separate file system" in done.stderr


@pytest.mark.parametrize("trouble", ["name in both", "a program runs there", "an earlier start"])
def test_home_folders_are_not_touched_in_doubt(trouble: str, homes: tuple[Path, Path]) -> None:
    """A refusal changes nothing."""
    home, shared = homes
    works = subprocess.Popen(["sleep", "60"], cwd=home / "ada") if trouble == "a program runs there" else None
    try:
        if trouble == "name in both":
            (shared / "grace").mkdir(parents=True)
        if trouble == "an earlier start":
            home.with_name("home.before-cluster").mkdir()
        before = listing(home.parent)
        done = subprocess.run([str(FILES / "move-homes"), str(home), str(shared)], capture_output=True, check=False)
        assert done.returncode == 2, done.stdout
        after = listing(home.parent)
        after.pop("srv", None)
        before.pop("srv", None)
        assert after == before
    finally:
        if works:
            works.kill()
            works.wait()


def test_the_daemons_accept_the_files(controller: Path) -> None:
    namespaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    script = str(HERE / "controller_from_guide.sh")
    said = run("unshare", *namespaces, "bash", script, str(controller))
    facts = dict(re.findall(r"(\w+) *= *(\S+)", said))
    assert facts["SlurmUser"].startswith("slurm(")
    assert facts["ProctrackType"] == "proctrack/cgroup"
    assert facts["CgroupPlugin"] == "cgroup/v2"
    assert facts["ConstrainDevices"] == "yes"
    assert facts["HealthCheckProgram"] == "/etc/slurm/healthcheck"
    assert "Contain" in facts["PrologFlags"], "pam_slurm_adopt needs it"
    assert facts["CfgTRES"].startswith("cpu=32,mem=120000M")
    if facts["accounting"] == "yes":
        assert facts["AccountingStorageType"] == "accounting_storage/slurmdbd"
        assert facts["AccountingStorageTRES"].endswith("gres/gpu")


def test_the_firewalls_are_closed_except_for_named_ports(tmp_path: Path) -> None:
    need_slurm()
    if shutil.which("nft") is None:
        pytest.skip("not installed: nft (apt-get install nftables)")
    for name in ("controller", "node"):
        text = (FILES / f"firewall-{name}.nft").read_text()
        rules = tmp_path / f"{name}.nft"
        rules.write_text(text.replace("/etc/nftables.d/addresses.nft", str(FILES / "addresses.nft")))
        loaded = run("unshare", "--net", "bash", "-c", f"nft -f {rules} && nft list ruleset")
        assert loaded.count("policy drop") == 2
        for line in loaded.splitlines():
            if "dport" in line:
                assert "ip saddr" in line, f"open to the world: {line}"
    assert "6818" in (FILES / "firewall-node.nft").read_text()
    assert "6817, 6819" in (FILES / "firewall-controller.nft").read_text()


def test_jobs_run_behind_the_firewalls_and_other_machines_are_blocked(tmp_path: Path) -> None:
    need_slurm()
    if shutil.which("nft") is None:
        pytest.skip("not installed: nft (apt-get install nftables)")
    with Cluster(nodes=2, extra=("SrunPortRange=60001-62000",)) as cluster:
        address = dict(line.split()[::-1] for line in (cluster.state / "hosts").read_text().splitlines())
        for ours, real in {"10.0.0.1": "ctl", "10.0.0.11": "n1", "10.0.0.12": "n2"}.items():
            for path in FILES.glob("*.nft"):
                copy = tmp_path / path.name
                text = copy.read_text() if copy.exists() else path.read_text()
                text = re.sub(rf"{re.escape(ours)}(?![\d.])", address[real], text)
                copy.write_text(text.replace("/etc/nftables.d", str(tmp_path)))
        for name in ("ctl", "n1", "n2"):
            rules = tmp_path / f"firewall-{'controller' if name == 'ctl' else 'node'}.nft"
            run("nsenter", f"--target={cluster.host_pid(name)}", "--net", "nft", "-f", str(rules))

        inside = ("nsenter", f"--target={cluster.host_pid('ctl')}", "--all")
        assert sorted(cluster.run(*inside, "srun", "--nodes=2", "hostname").split()) == ["n1", "n2"]
        # srun inside a batch job listens on a node.
        job = cluster.run(
            *inside, "sbatch", "--parsable", "--nodes=2", f"--output={tmp_path}/out", "--wrap=srun hostname"
        )
        cluster.wait_until(
            lambda: "COMPLETED" in cluster.run(*inside, "scontrol", "show", "job", job.strip()), 20, "the job"
        )
        assert sorted((tmp_path / "out").read_text().split()) == ["n1", "n2"]
        # This machine is on the same network and not in the list.
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.run("sinfo", timeout_s=2)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Cluster, Path]]:
    """A node with the guide's health check and epilog. It is healthy while the folder exists."""
    need_slurm()
    for name in ("healthcheck", "epilog"):
        shutil.copy2(FILES / name, tmp_path / name)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    lines = (
        f"HealthCheckProgram={tmp_path}/healthcheck",
        "HealthCheckInterval=1",
        "HealthCheckNodeState=ANY",
        f"Epilog={tmp_path}/epilog",
    )
    with Cluster(nodes=1, extra=lines) as cluster:
        settings = (f'WRITABLE_FOLDERS="{scratch}"', 'MAX_CLOCK_OFFSET_MS=""', f"export SLURM_CONF={cluster.conf}")
        (tmp_path / "healthcheck.conf").write_text("\n".join(settings))
        yield cluster, scratch


def test_an_unhealthy_node_is_drained_and_resumes_by_itself(watched: tuple[Cluster, Path]) -> None:
    cluster, scratch = watched
    scratch.rmdir()
    cluster.wait_for_node("n1", ("drained", "drained*"))
    assert f"health: {scratch} is not writable" in cluster.run("sinfo", "--list-reasons", "--format=%100E")
    scratch.mkdir()
    cluster.wait_for_node("n1", "idle")


def test_a_drain_by_an_administrator_is_not_changed(watched: tuple[Cluster, Path]) -> None:
    cluster, scratch = watched
    check = [str(scratch.parent / "healthcheck")]
    surroundings = cluster.environment(SLURMD_NODENAME="n1")
    cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=fan")
    for prepare in (lambda: None, scratch.rmdir):  # healthy, then unhealthy
        prepare()
        subprocess.run(check, env=surroundings, timeout=30, check=True)
        assert cluster.run("sinfo", "--noheader", "--list-reasons", "--format=%E").split() == ["fan"]


def test_the_epilog_removes_a_users_shared_memory_after_the_last_job(watched: tuple[Cluster, Path]) -> None:
    cluster, _ = watched
    cluster.run("srun", "--uid=nobody", "touch", "/dev/shm/left")
    shared = Path(f"/proc/{cluster.host_pid('n1')}/root/dev/shm")
    cluster.wait_until(lambda: not (shared / "left").exists(), 10, "an empty /dev/shm")
    cluster.run("srun", "touch", "/dev/shm/of-root")
    cluster.wait_for_node("n1", "idle")
    assert (shared / "of-root").exists()


def test_the_first_job_runs_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.run(
        "sbatch", "--parsable", "--gpus-per-node=1", str(FILES / "first-job.sbatch"), cwd=tmp_path
    ).strip()
    cluster.wait_for_state(job, "COMPLETED")
    lines = sorted((tmp_path / f"first-job-{job}.txt").read_text().splitlines())
    assert [re.sub(r"task \d", "task", line) for line in lines] == ["n1: task of 2, GPUs: 0", "n2: task of 2, GPUs: 0"]


def test_scripts_are_valid_and_the_guide_names_every_file() -> None:
    guide = GUIDE.read_text()
    for path in sorted(FILES.iterdir()):
        assert path.name in guide, f"{path.name} is not in {GUIDE.name}"
        if path.read_text().startswith(("#!/usr/bin/env bash", "#!/bin/bash")):
            run("bash", "-n", str(path))
