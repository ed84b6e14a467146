"""Wrong submissions are refused within a second, with one screen, and do not reach sbatch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.fake_slurm import FakeSlurm, clean_home
from paceline.cli.main import main
from paceline.integrations.slurm import facts as slurm_facts
from paceline.launch.job import SlurmFlags
from paceline.settings.declare import fields_of
from paceline.settings.schema import find_field

USER = 2
MOST_LINES = 12
JOB = ["shapes-cnn", "--nodes", "2", "--processes-per-node", "2", "--time", "00:10:00"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def submit(*arguments: str) -> int:
    return main(["submit", "slurm", *arguments])


# The arguments after `paceline submit slurm`, and the expected text.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "no such recipe": (["shape-cnn", *JOB[1:]], ["no recipe", "shapes-cnn"]),
    "misspelt flag of train": ([*JOB, "--epoch", "2"], ["unknown flag '--epoch'", "--epochs"]),
    "misspelt flag of submit": ([*JOB, "--acount", "x"], ["unknown flag '--acount'", "--account"]),
    "value out of range": ([*JOB, "--epochs", "0"], ["epochs is out of range"]),
    "no ranks": (["shapes-cnn", "--nodes", "2"], ["number of ranks per node is missing", "--gpus-per-node N"]),
    "ranks twice": ([*JOB, "--gpus-per-node", "2"], ["given twice", "--processes-per-node 2"]),
    "--processes": ([*JOB, "--processes", "4"], ["given per node", "flag --processes", "--processes-per-node 4"]),
    "batch not divisible": (
        ["shapes-cnn", "--nodes", "3", "--processes-per-node", "2"],
        ["not divisible by 6", "nodes x ranks per node of"],
    ),
    "lanes not divisible": ([*JOB, "--lanes", "2"], ["2 lanes cannot be shared equally by 4 ranks"]),
    "nodes not a number": (["shapes-cnn", "--nodes", "2-4", "--processes-per-node", "2"], ["nodes: '2-4'"]),
    "no nodes": (["shapes-cnn", "--nodes", "0", "--processes-per-node", "2"], ["nodes is out of range", "1 or more"]),
    "flag without value": (["shapes-cnn", "--nodes", "--time", "10"], ["--nodes needs a value"]),
    "gpus not a number": (["shapes-cnn", "--gpus-per-node", "all"], ["gpus_per_node: 'all'", "TYPE:NUMBER"]),
    "gres and gpus differ": (
        ["shapes-cnn", "--gpus-per-node", "4", "--gres", "gpu:a100:2"],
        ["two different numbers of GPUs", "4 and 2"],
    ),
    "CPU ranks beside GPUs": ([*JOB, "--gres", "gpu:2"], ["GPUs that would not be used", "--gpus-per-node 2"]),
    "time with letters": ([*JOB[:-1], "2h"], ["not a time limit", "'2h'", "D-HH:MM:SS"]),
    "time with 61 minutes": ([*JOB[:-1], "1:61:00"], ["not a time limit"]),
    "no time at all": ([*JOB[:-1], "0"], ["not a time limit"]),
    "time below the notice": ([*JOB[:-1], "2"], ["warning signal would come before", "120 s", "--signal-notice-s 30"]),
    "notice too long": ([*JOB, "--signal-notice-s", "99999"], ["signal_notice_s is out of range", "65535"]),
    "unknown start": ([*JOB, "--start", "torchruns"], ["start: 'torchruns'", "--start torchrun"]),
    "fewer CPUs than ranks": ([*JOB, "--cpus-per-task", "1"], ["more ranks than CPUs", "--cpus-per-task 2"]),
    "memory in words": ([*JOB, "--mem", "much"], ["mem: 'much'", "64G"]),
    "venv that is none": ([*JOB, "--venv", "nowhere"], ["no virtual environment", "nowhere"]),
    "venv in a container": (
        [*JOB, "--venv", "v", "--container-image", "x/y"],
        ["two environments", "--container-image x/y"],
    ),
    "venv and conda": ([*JOB, "--venv", "v", "--conda", "c"], ["two environments for python"]),
    "image that is not there": ([*JOB, "--container-image", "./a.sqsh"], ["no such image", "./a.sqsh"]),
    "EDF that is not there": ([*JOB, "--environment", "edf.toml"], ["no such file", "edf.toml"]),
    "conda folder not there": ([*JOB, "--conda", "/no/such/env"], ["no such conda environment"]),
    "sbatch line that is none": ([*JOB, "--sbatch", "exclusive"], ["not an option of sbatch"]),
    "sbatch line of ours": ([*JOB, "--sbatch", "--nodes=4"], ["the script sets --nodes itself"]),
    "sbatch line of ours, short": ([*JOB, "--sbatch", "-N4"], ["the script sets -N", "--nodes"]),
    "two sbatch lines in one": ([*JOB, "--sbatch", "--exclusive\n#SBATCH --x"], ["sbatch contains a newline"]),
    "variable that is not set": ([*JOB, "--env", "A_VARIABLE_OF_NOBODY"], ["A_VARIABLE_OF_NOBODY is not set"]),
    "secret of Kubernetes": ([*JOB, "--env", "A=secret:b/c"], ["only Kubernetes"]),
    "variable of the launcher": ([*JOB, "--env", "SLURM_PROCID=0"], ["belongs to the launcher"]),
    "account on two lines": ([*JOB, "--account", "a\n#SBATCH --x"], ["account contains a newline", "text on one line"]),
    "array that is none": ([*JOB, "--array", "1..4"], ["array: '1..4'", "0-7"]),
    "array into one folder": ([*JOB, "--array", "0-3", "--output-dir", "x"], ["would share one run folder"]),
    "array that resumes": ([*JOB, "--array", "0-3", "--resume", "auto"], ["would share one run folder"]),
    "single on many ranks": ([*JOB, "--strategy", "single"], ["strategy single", "2 nodes x 2 ranks"]),
    "cuda without GPUs": ([*JOB, "--device", "cuda"], ["contradict", "--gpus-per-node 2"]),
    "cpu with GPUs": (["shapes-cnn", "--gpus-per-node", "2", "--device", "cpu"], ["contradict", "leave --device"]),
    "site without a file": ([*JOB, "--site", "alps"], ["no file of site profiles", "account:"]),
    "nothing to resume": ([*JOB, "--resume", "runs/gone"], ["nothing to resume from", "runs/gone"]),
    "no weights": ([*JOB, "--init-from", "gone.pth"], ["no weights to start from", "gone.pth"]),
    "no data": (["folder-resnet50", *JOB[1:], "--data-dir", "gone"], ["no such folder", "gone"]),
    "output below a file": ([*JOB, "--output-dir", "bin/sbatch/run"], ["cannot be created", "not a folder"]),
    "output is a file": ([*JOB, "--output-dir", "bin/sbatch"], ["output_dir is a file"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_submissions_never_reach_the_fake_sbatch(
    name: str, fake: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments, parts = WRONG[name]
    began_s = time.process_time()
    code = submit(*arguments)
    took_s = time.process_time() - began_s
    captured = capsys.readouterr()
    screen = captured.err.strip()
    assert code == USER, screen
    assert captured.out == ""
    assert screen.startswith("error: ")
    assert screen.count("error: ") == 1
    assert len(screen.splitlines()) <= MOST_LINES, screen
    for part in parts:
        assert part in screen, screen
    assert fake.calls("sbatch") == []
    assert took_s < 1
    assert not (tmp_path / "runs").exists()


def test_there_are_many_wrong_submissions() -> None:
    assert len(WRONG) >= 20


def test_no_sbatch(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (fake.folder / "empty").mkdir()
    monkeypatch.setenv("PATH", str(fake.folder / "empty"))
    assert submit(*JOB) == USER
    assert "no sbatch" in capsys.readouterr().err
    assert submit(*JOB, "--dry-run") == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash")


def test_another_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "shapes-cnn", "--nodes", "2"]) == USER
    assert "paceline submit slurm shapes-cnn --nodes 2" in capsys.readouterr().err


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paceline", *arguments],
        cwd=cwd,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_and_refusals_do_not_import_torch(fake: FakeSlurm, tmp_path: Path) -> None:
    """In a separate process, like a user's. Imports take most of the time, on any machine."""
    shown = command("submit", "slurm", "--help", cwd=tmp_path)
    assert shown.returncode == 0
    for setting in fields_of(SlurmFlags).values():
        assert f"  {setting.flag} " in shown.stdout
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "yaml"}
    refused = command("submit", "slurm", *JOB, "--lanes", "2", cwd=tmp_path)
    assert refused.returncode == USER
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in refused.stderr.splitlines()}
    assert not imported & {"torch", "numpy"}
    assert fake.calls("sbatch") == []


def test_no_flag_has_two_meanings() -> None:
    assert [name for name in fields_of(SlurmFlags) if find_field(name)] == []


# --- Profiles ---------------------------------------------------------------------------------------------------------

SITES = """\
default:
  account: proj42
  partition: gpu
  gpus_per_node: 4
  gres: gpu:4
  env: {NCCL_DEBUG: WARN}
  sbatch: [--exclusive]
  time: 02:00:00
alps:
  account: other
  container-image: x/y
"""


def write_sites(folder: Path, text: str = SITES) -> Path:
    path = folder / ".config" / "paceline" / "sites.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def script_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert submit(*arguments, "--dry-run") == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_flags_have_priority_over_a_profile(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sites(tmp_path)
    plain = script_of(capsys, "shapes-cnn", "--env", "A=1")
    for line in ("--account=proj42", "--partition=gpu", "--gres=gpu:4", "--time=02:00:00", "--exclusive"):
        assert f"\n#SBATCH {line}\n" in plain
    assert "--gpus-per-node" not in plain, "the gres line requests them already"
    assert "export NCCL_DEBUG=WARN\nexport A=1\n" in plain
    other = script_of(
        capsys, "shapes-cnn", "--processes-per-node", "2", "--account", "mine", "--env", "NCCL_DEBUG=INFO"
    )
    assert "#SBATCH --account=mine\n" in other
    assert "--gres" not in other
    assert other.index("NCCL_DEBUG=WARN") < other.index("NCCL_DEBUG=INFO"), "the flag's line is last and has priority"
    alps = script_of(capsys, "shapes-cnn", "--processes-per-node", "2", "--site", "alps")
    assert "#SBATCH --account=other\n" in alps
    assert "--container-image=x/y" in alps
    assert "--exclusive" not in alps
    own = script_of(capsys, "shapes-cnn", "--processes-per-node", "2", "--site", "alps", "--conda", "c")
    assert "--container-image" not in own, "another python replaces the profile's"
    none = script_of(capsys, "shapes-cnn", "--processes-per-node", "2", "--site=")
    assert "account" not in none


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("default:\n  acount: x\n", ["unknown key 'acount'", "line 2", "perhaps you meant account"]),
        ("default:\n  job_name: x\n", ["unknown key 'job_name'", "line 2"]),
        ("default:\n  time:\n", ["time needs a value", "line 2"]),
        ("default:\n  account: [a, b]\n", ["account needs a value", "line 2"]),
        ("default:\n  max_requeues: two\n", ["max_requeues: 'two'", "line 2"]),
        ("default: x\n", ["site 'default' must be", "line 1"]),
        ("- x\n", ["must be `key: value` lines"]),
        ("default: {\n", ["not valid YAML"]),
    ],
)
def test_wrong_profiles(
    text: str, parts: list[str], fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sites(tmp_path, text)
    assert submit(*JOB) == USER
    screen = capsys.readouterr().err
    assert str(path) in screen
    for part in parts:
        assert part in screen, screen
    assert fake.calls("sbatch") == []


def test_site_that_is_not_in_the_file(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sites(tmp_path).rename(tmp_path / "mine.yaml")
    monkeypatch.setenv("PACELINE_SITES", str(tmp_path / "mine.yaml"))
    assert submit(*JOB, "--site", "alp") == USER
    screen = capsys.readouterr().err
    assert "no site 'alp'" in screen
    assert "--site alps" in screen
    monkeypatch.setenv("PACELINE_SITES", str(tmp_path / "gone.yaml"))
    assert submit(*JOB) == USER
    assert "gone.yaml" in capsys.readouterr().err


# --- Submitting -------------------------------------------------------------------------------------------------------


def test_fake_sbatch_gets_the_script(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answer("squeue", "4711|PENDING|Priority|N/A|0:00|10:00|")
    assert submit(*JOB, "--output-dir", "out/a run", "--epochs", "2") == 0
    shown = capsys.readouterr().out
    folder = tmp_path / "out" / "a run"
    assert fake.calls("sbatch") == [f"--parsable {folder}/job.sbatch"]
    record = json.loads((folder / "job.json").read_text())
    assert (record["job_id"], record["cluster"], record["script"]) == ("4711", "", f"{folder}/job.sbatch")
    assert record["command"][:4] == ["paceline", "submit", "slurm", "shapes-cnn"]
    assert (folder / "logs").is_dir(), "Slurm creates no folders for its output"
    assert "job 4711 is in the queue" in shown
    for verb in ("status", "logs", "cancel"):
        assert f"paceline {verb} 'out/a run'" in shown
    # It is queued now: a second one is refused, with the id.
    assert submit(*JOB, "--output-dir", "out/a run") == USER
    screen = capsys.readouterr().err
    assert "has a job already" in screen
    assert "job 4711, pending" in screen
    assert len(fake.calls("sbatch")) == 1


@pytest.mark.parametrize("way", ["hang", "gone"])
def test_a_fake_cluster_that_does_not_answer_delays_no_job(
    way: str, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an answer nothing is checked: the job reaches sbatch after one short timeout."""
    monkeypatch.setattr(slurm_facts, "ASK_TIMEOUT_S", 0.5)
    for client in ("sinfo", "sacctmgr"):
        if way == "hang":
            fake.hang(client)
        else:
            (fake.folder / client).unlink()
    began = time.monotonic()
    assert submit(*JOB, "--nodes", "2", "--partition", "nowhere") == 0, capsys.readouterr().err
    assert time.monotonic() - began < 30, "a client that hangs sleeps for 60 s"
    assert len(fake.calls("sbatch")) == 1


def test_after_its_end_a_second_fake_job_resumes(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answer("sbatch", "4712;lab")
    assert submit(*JOB, "--output-dir", "run") == 0
    fake.forget_job()
    assert submit(*JOB, "--output-dir", "run", "--resume", "auto") == 0
    record = json.loads((tmp_path / "run" / "job.json").read_text())
    assert (record["job_id"], record["cluster"], record["earlier"]) == ("4712", "lab", ["4711"])


def finished_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.lock").touch()
    (folder / "config.yaml").write_text("dataset: 'shapes'\nepochs: 10\n")
    (folder / "status.json").write_text('{"status": "finished", "step": 840}')


def test_a_finished_run_is_not_submitted_to_the_fake(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(tmp_path / "run")
    assert submit(*JOB, "--output-dir", "run", "--epochs", "10") == 0
    assert "run is finished (840 steps); nothing was submitted" in capsys.readouterr().out
    assert submit(*JOB, "--output-dir", "run", "--epochs", "10", "--resume", "auto") == 0
    assert "nothing was submitted" in capsys.readouterr().out
    assert fake.calls("sbatch") == []
    # With more epochs it is.
    assert submit(*JOB, "--output-dir", "run", "--epochs", "20", "--resume", "auto") == 0
    assert len(fake.calls("sbatch")) == 1


def test_a_notice_too_short_to_save_is_refused_before_the_fake_sbatch(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(tmp_path / "run")
    (tmp_path / "run" / "status.json").write_text('{"status": "preempted", "step": 84, "save_s": 70.2}')
    again = [*JOB, "--output-dir", "run", "--resume", "auto"]
    assert submit(*again, "--signal-notice-s", "120") == 2
    assert "--signal-notice-s 151" in capsys.readouterr().err
    assert fake.calls("sbatch") == []
    assert submit(*again, "--signal-notice-s", "151") == 0


def test_a_refusal_of_the_fake_sbatch_leaves_no_folder(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake.folder / "sbatch.1.sh").write_text("echo 'sbatch: error: invalid partition: x' >&2; exit 1\n")
    assert submit(*JOB, "--partition", "x", "--output-dir", "run") == USER
    assert "invalid partition: x" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_fake_sbatch_that_does_not_answer(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.integrations.slurm.client.CLIENT_TIMEOUT_S", 0.3)
    (fake.folder / "sbatch.1.sh").write_text("exec sleep 60\n")
    assert submit(*JOB) not in (0, USER)
    screen = capsys.readouterr().err
    assert "sbatch did not answer within 0.3 s" in screen
    assert "squeue --me" in screen, "the job may have been submitted"
