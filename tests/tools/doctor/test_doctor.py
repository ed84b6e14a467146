"""`paceline doctor` with the command: a healthy machine, and the faults that it must find.

Six of the ten faults are real: a used port, a /dev/shm of four megabytes, an unknown host name, a full disk, a
folder of another user, a missing GPU. A wrong clock, a slow rank and a wrong one are injected into a rank
(`--inject`). Other versions are both injected and real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline as package
from harness.cli import Answer, command, environment, paceline
from harness.processes import processes_in, seconds_until_empty, started
from paceline.cli.main import main
from paceline.training.known_training import KNOWN_HASH

NOBODY = 65534
NODE = [
    *("python", "packages", "torch", "devices", "shared memory", "open files", "memory", "cores"),
    *("run folder", "clock", "data folder", "temporary folder", "host name", "ports", "interfaces"),
]
TOGETHER = ["versions", "reach", "clocks", "mtu", "all-reduce", "pairs", "pace", "links", "training"]
# Mounts a small /dev/shm or a small full disk, and replaces itself with the command. The mounts end with it.
SMALL_SHM = 'mount -t tmpfs -o size=4m shm /dev/shm && exec "$@"'
FULL_DISK = 'mount -t tmpfs -o size=2m full full && head -c 4m /dev/zero 2>/dev/null >full/filler; exec "$@"'
ALL_MOUNTS = "mount -t tmpfs -o size=4m shm /dev/shm; " + FULL_DISK
Findings = dict[str, dict[str, Any]]


def can_mount() -> bool:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(probe, capture_output=True, check=False).returncode
    )


needs_mount = pytest.mark.skipif(not can_mount(), reason="this machine does not let us mount a tmpfs (unshare -rm)")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


def findings_of(answer: Answer) -> Findings:
    assert answer.err == "", answer
    content = json.loads(answer.out)
    assert content["seconds"] < 60
    assert answer.code == (0 if content["healthy"] else 1)
    return {finding["name"]: finding for finding in content["findings"]}


def failures(found: Findings) -> list[str]:
    return [name for name, finding in found.items() if finding["status"] == "fail"]


def in_namespace(script: str, *flags: str, cwd: Path, **extra: str) -> Answer:
    doctor = (sys.executable, "-m", "paceline", "doctor", "--json", *flags)
    return command("unshare", "-rm", "sh", "-c", script, "sh", *doctor, cwd=cwd, env=extra)


# --- A healthy machine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    answer = paceline("doctor", "--processes=2", "--json", "--report=report.md", cwd=folder)
    (folder / "answer.json").write_text(json.dumps([answer.code, answer.out, answer.err]))
    return folder


def test_a_healthy_machine_passes_within_a_minute(healthy: Path) -> None:
    answer = Answer(*json.loads((healthy / "answer.json").read_text()))
    found = findings_of(answer)
    assert failures(found) == []
    assert list(found) == NODE + TOGETHER
    content = json.loads(answer.out)
    assert re.fullmatch(r"healthy: \d+ checks passed(, \d warnings?)?, in [\d.]+ s", content["verdict"])
    assert (content["world_size"], content["launcher"], content["injected"]) == (2, "paceline", {})
    assert (content["hosts"], content["exclude"]) == ([socket.gethostname()], [])
    assert found["training"]["details"]["alone"] == found["training"]["details"]["together"] == [KNOWN_HASH] * 2
    assert found["all-reduce"]["status"] == "pass"


def test_the_report_can_be_pasted_and_no_other_file_stays(healthy: Path) -> None:
    text = (healthy / "report.md").read_text()
    assert text.startswith("### paceline doctor\n\n**healthy: ")
    for name in NODE + TOGETHER:
        assert re.search(rf"^\| (pass|warn) \| {name} \|", text, re.MULTILINE), name
    assert sorted(path.name for path in healthy.iterdir()) == ["answer.json", "report.md"]


# --- Six real faults --------------------------------------------------------------------------------------------------

REMEDIES = {
    "devices": "--device cpu",
    "shared memory": "--shm-size",
    "run folder": "--output-dir",
    "data folder": "free space",
    "rendezvous address": "MASTER_ADDR must name rank 0's node",
    "ports": "another MASTER_PORT",
}


@needs_mount
@needs_root
def test_six_real_faults_are_all_found_with_their_remedies(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        flags = ["--device=cuda", "--output-dir=theirs/run", "--data-dir=full/data"]
        meet = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": str(port)}
        found = findings_of(in_namespace(ALL_MOUNTS, *flags, cwd=tmp_path, **meet))
    assert sorted(failures(found)) == sorted(REMEDIES)
    for name, part in REMEDIES.items():
        assert part in found[name]["remedy"]
    assert found["devices"]["status"] == "fail"
    assert "/dev/shm has 4 MB free of 4 MB" in found["shared memory"]["what"]
    assert found["run folder"]["what"].endswith("cannot be written: Permission denied")
    assert "the disk is full, 0 MB are free" in found["data folder"]["what"]
    assert "no-such-host.invalid does not resolve" in found["rendezvous address"]["what"]
    assert f"port {port}" in found["ports"]["what"]
    assert found["ranks"]["what"] == "not tried: first of all devices, shared memory"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "theirs"]


@pytest.mark.slow
@needs_mount
def test_only_a_small_shm(tmp_path: Path) -> None:
    assert failures(findings_of(in_namespace(SMALL_SHM, "--processes=2", cwd=tmp_path))) == ["shared memory"]


@pytest.mark.slow
@needs_mount
def test_with_only_a_full_disk_the_ranks_are_examined(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    found = findings_of(in_namespace(FULL_DISK, "--processes=2", "--output-dir=full/run", cwd=tmp_path))
    assert failures(found) == ["run folder"]
    assert found["training"]["status"] == "pass"


@pytest.mark.slow
def test_only_a_used_port(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        found = findings_of(paceline("doctor", "--json", "--processes=1", cwd=tmp_path, env=where))
    assert failures(found) == ["ports"]
    assert f"process {os.getpid()} " in found["ports"]["what"]


@pytest.mark.slow
def test_only_an_unknown_host_name(tmp_path: Path) -> None:
    found = findings_of(paceline("doctor", "--json", "--processes=1", cwd=tmp_path, MASTER_ADDR="nowhere.invalid"))
    assert failures(found) == ["rendezvous address"]


@pytest.mark.slow
@needs_root
def test_a_host_that_cannot_resolve_its_own_name(tmp_path: Path) -> None:
    """Torch's launcher would wait for minutes, so no ranks are started."""
    doctor = f"{sys.executable} -m paceline doctor --json"
    found = findings_of(command("unshare", "-u", "sh", "-c", f"hostname lost-host; {doctor}", cwd=tmp_path))
    assert failures(found) == ["host name"]
    assert "/etc/hosts" in found["host name"]["remedy"]


# --- Faults of ranks --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_injected_clock_slow_and_wrong_rank_are_named_with_the_count_of_injections(tmp_path: Path) -> None:
    faults = "clock rank=1; slow rank=1; wrong rank=1"
    answer = paceline("doctor", "--json", "--processes=2", f"--inject={faults}", cwd=tmp_path)
    found, host = findings_of(answer), socket.gethostname()
    assert failures(found) == ["clocks", "all-reduce", "pace", "training"]
    assert found["clocks"]["what"] == f"the clock of rank 1 on {host} is 100.0 s ahead of rank 0"
    assert found["all-reduce"]["details"]["wrong_ranks"] == found["training"]["details"]["wrong_ranks"] == [1]
    assert found["pace"]["details"]["slow_ranks"] == [1]
    assert all(found[name]["remedy"] for name in failures(found))
    fault_counts = json.loads(answer.out)["injected"]
    assert sorted(fault_counts) == ["clock", "slow", "wrong"]
    assert min(fault_counts.values()) > 0


@pytest.mark.slow
def test_an_injected_wrong_clock_of_the_node_is_detected_by_its_disk(tmp_path: Path) -> None:
    found = findings_of(paceline("doctor", "--json", "--processes=1", "--inject=clock", cwd=tmp_path))
    assert failures(found) == ["clock"]
    assert "100.0 s ahead of the clock of the disk" in found["clock"]["what"]


@pytest.mark.slow
def test_injected_other_versions_are_named_and_nothing_is_exchanged(tmp_path: Path) -> None:
    found = findings_of(paceline("doctor", "--json", "--processes=2", "--inject=versions rank=1", cwd=tmp_path))
    assert failures(found) == ["versions"]
    assert "torch 0.0.0 at rank 1" in found["versions"]["what"]
    assert {found[name]["status"] for name in TOGETHER[4:]} == {"skip"}


@pytest.mark.slow
def test_a_rank_with_another_version_of_the_code_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(package.__file__).parent, other / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    text = (other / "paceline" / "__init__.py").read_text()
    (other / "paceline" / "__init__.py").write_text(text.replace(package.__version__, "9.9.9"))
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    doctor = [sys.executable, "-m", "paceline", "doctor", "--json"]
    ranks = [
        subprocess.Popen(
            doctor,
            cwd=tmp_path,
            env=environment(**common, RANK=str(rank), LOCAL_RANK=str(rank), **extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, extra in enumerate([{}, {"PYTHONPATH": str(other)}])
    ]
    (out, err), (quiet, _) = (rank.communicate(timeout=60) for rank in ranks)
    assert (quiet, ranks[1].returncode) == ("", 1)
    found = findings_of(Answer(ranks[0].returncode, out, err))
    assert failures(found) == ["versions"]
    assert f"paceline 9.9.9 at rank 1 on {socket.gethostname()}" in found["versions"]["what"]


@pytest.mark.slow
def test_a_listener_at_the_rendezvous_address_is_not_taken_for_rank_0(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts the connection and sends nothing
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        found = findings_of(paceline("doctor", "--json", cwd=tmp_path, env={**place, **rank}))
    assert found["rendezvous"]["details"] == {"missing": [0]}
    assert "ranks" not in found


@pytest.mark.slow
def test_a_rank_that_stops_answering_is_named_within_a_minute(tmp_path: Path) -> None:
    with started("doctor", "--processes=2", cwd=tmp_path) as doctor:
        doctor.wait_for("now 2 ranks together")
        while len(doctor.ranks()) < 2:
            pass
        os.kill(doctor.ranks()[-1], signal.SIGSTOP)
        assert doctor.wait(timeout_s=75) == 1
        assert "Traceback" not in doctor.err
    text = "".join(doctor.lines)
    assert re.search(r"rank 1 did not answer|no report from rank 1|rank 1 on \S+ in", text), text
    assert float(re.findall(r"in ([\d.]+) s", text)[-1]) < 60


# --- Launchers and exits ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_doctor_joins_the_ranks_of_torchrun_and_prints_one_report(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "paceline", "doctor"]
    answer = command(*torchrun, "--launch=torchrun", cwd=tmp_path)
    assert answer.code == 0, answer
    assert answer.out.count("healthy: ") == 1
    assert "2 ranks by torchrun on " in answer.out
    assert "the known weights, bit for bit" in re.sub(r"\s+", " ", answer.out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes", [1, 3, 4, 5], ids=["before the ranks", "while torch is loaded", "at a birth", "with ranks"]
)
def test_an_interrupt_ends_at_once_without_orphans(processes: int, tmp_path: Path) -> None:
    with started("doctor", "--processes=2", cwd=tmp_path) as doctor:
        doctor.wait_for("now 2 ranks together")
        while len(processes_in(tmp_path)) < processes:  # the command, the resource tracker, the fork server, the ranks
            assert doctor.process.poll() is None, doctor.err
        os.killpg(doctor.process.pid, signal.SIGINT)  # like a terminal on Ctrl-C
        assert doctor.wait(timeout_s=20) == 130
        assert doctor.err == "\ninterrupted\n"
        seconds_until_empty(tmp_path, limit_s=10)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--launch=pbs"], "allowed: one of local, torchrun, slurm"),
        (["--launch=torchrun"], "torchrun --nproc-per-node 2 -m paceline doctor"),
        (["--device=tpu"], "allowed: one of auto, cpu, cuda"),
        (["--processes"], "--processes needs a value"),
        (["--processes=2:4"], "one number of ranks is needed"),
        (["--proceses=2"], "perhaps you meant --processes"),
        (["shapes-cnn"], "unexpected argument 'shapes-cnn'"),
        (["--nodes=2"], "--nodes needs --launch slurm"),
        (["--launch=slurm", "--nodes=0"], "nodes is out of range"),
        (["--", "--partition=x"], "options behind -- needs --launch slurm"),
        (["--report=/nowhere/at/all.md"], "there is no such folder"),
        (["--inject=flood"], "allowed: clock, slow, wrong, versions"),
    ],
)
def test_a_mistake_of_doctor_gives_one_screen(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    screen = capsys.readouterr().err
    assert screen.startswith("error: ")
    assert part in screen
    assert len(screen.splitlines()) <= 6


def test_help_names_every_flag_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in (
        "--launch",
        "--processes",
        "--device",
        "--output-dir",
        "--nodes",
        "--exclude-to",
        "--report",
        "--json",
    ):
        assert flag in text
    assert "1: a check failed" in text


def test_doctor_does_not_import_torch_before_the_ranks(tmp_path: Path) -> None:
    """torch may be broken."""
    probe = "import sys, paceline.cli.doctor; print('torch' in sys.modules, 'numpy' in sys.modules)"
    answer = command(sys.executable, "-c", probe, cwd=tmp_path)
    assert answer.out.split() == ["False", "False"]


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    found = findings_of(paceline("doctor", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path / "broken")))
    assert found["torch"]["what"] == "torch cannot be loaded: ImportError: libcudart.so.13: cannot open"
    assert found["ranks"]["status"] == "skip"
