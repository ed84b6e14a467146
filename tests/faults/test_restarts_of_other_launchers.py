"""Restarts by torchrun before the first checkpoint find their own run and no other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from harness.cli import Answer, command, paceline
from harness.runs import read_results
from paceline.runs.folder import RUNS, RunFolder, write_json
from paceline.runs.place import find_folder_of_job
from paceline.runtime.detect import identify_job
from paceline.settings.load import load_config
from paceline.training.inject import read_ledger

QUICK = ("shapes-cnn", "--num-samples=320", "--epochs=1", "--global-batch-size=64", "--track", "--log-frequency=1")


def torchrun(folder: Path, *flags: str, restarts: int = 1) -> Answer:
    launcher = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=1",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
    )
    return command(
        *(sys.executable, *launcher, "--master-port=0", "-m", "paceline", "train", *QUICK, *flags),
        cwd=folder,
        OMP_NUM_THREADS="1",
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the recipe. Its name sorts after all later ones."""
    folder = tmp_path_factory.mktemp("finished")
    answer = paceline("train", *QUICK, "--processes=1", "--output-dir=runs/shapes-cnn-29990101-000000", cwd=folder)
    assert answer.code == 0, answer
    return folder


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.faults
def test_a_restart_before_the_first_checkpoint_leaves_an_older_finished_run_alone(finished: Path) -> None:
    """The second attempt continues in the folder of the first. The finished run keeps its results."""
    old = finished / "runs" / "shapes-cnn-29990101-000000"
    before = contents(old)
    answer = torchrun(finished, "--inject=raise rank=0 step=2")
    assert answer.code == 0, answer
    assert contents(old) == before
    (new,) = [path for path in (finished / "runs").iterdir() if path != old]
    assert [row["what"] for row in read_ledger(new / "faults.jsonl")] == ["raise (rank 0, step 2)"]
    assert read_results(new)["status"] == "finished"
    assert json.loads((new / "environment.json").read_text())["job"].startswith("torchrun ")


@pytest.mark.faults
def test_a_refused_first_attempt_is_refused_again(finished: Path) -> None:
    """A folder with another run is refused at every attempt. The restart does not use it."""
    old = finished / "runs" / "shapes-cnn-29990101-000000"
    before = contents(old)
    answer = torchrun(finished, f"--output-dir={old}")
    assert answer.code != 0
    assert contents(old) == before


def test_a_job_is_identified_by_agent_run_id_or_job_step() -> None:
    """Two jobs never share an identity. Two attempts of one job always do."""
    one_node = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}
    assert identify_job(one_node) == identify_job({**one_node, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert str(os.getppid()) in identify_job(one_node)
    nodes = {"TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "2"}
    assert identify_job(nodes) != identify_job({**nodes, "TORCHELASTIC_RUN_ID": "b"})
    assert identify_job(nodes) != identify_job({**nodes, "SLURM_JOB_ID": "7"})
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    assert identify_job(step) == identify_job({**step, "SLURM_RESTART_COUNT": "1", "SLURM_PROCID": "1"})
    assert identify_job(step) != identify_job({**step, "SLURM_STEP_ID": "1"})
    assert identify_job({}) == ""


def test_only_an_unfinished_run_of_the_job_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run of the same job and an unfinished run of another job are not continued."""
    monkeypatch.chdir(tmp_path)
    loaded = load_config("shapes-cnn", [])
    for name, job, state in (
        ("shapes-cnn-20260101-000000", "torchrun a", "running"),
        ("shapes-cnn-20260102-000000", "torchrun a", "finished"),
        ("shapes-cnn-20260103-000000", "torchrun b", "running"),
        ("shapes-cnn-20260104-000000", "", "running"),
    ):
        folder = RunFolder(RUNS / name)
        folder.create()
        write_json(folder.environment, {"job": job})
        folder.write_status(state)
    assert find_folder_of_job(loaded, "torchrun a") == RUNS / "shapes-cnn-20260101-000000"
    assert find_folder_of_job(loaded, "torchrun c") is None
    assert find_folder_of_job(loaded, "") is None
    given = load_config("shapes-cnn", ["--output-dir=runs/shapes-cnn-20260103-000000"])
    assert find_folder_of_job(given, "torchrun a") is None
    assert find_folder_of_job(given, "torchrun b") == RUNS / "shapes-cnn-20260103-000000"
