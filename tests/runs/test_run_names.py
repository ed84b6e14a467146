"""Runs that start in the same second have separate folders, with any launcher."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

import paceline
from harness.cli import environment
from harness.fake_slurm import FakeSlurm, clean_home
from paceline.cli.command import run_verb
from paceline.errors import UserError
from paceline.runs.folder import RUNS
from paceline.runs.place import claim_run_folder, claimed, decide_place, newest_run_folder
from paceline.settings.load import load_config

SECOND = "20261117-101010"
QUICK = ("synthetic-mlp", "--num-samples=640", "--global-batch-size=64", "--epochs=1", "--track", "--quiet")
AT_ONCE = 6
EXPECTED = [SECOND, *(f"{SECOND}-{number:02}" for number in range(2, AT_ONCE + 1))]


def stop_clock(folder: Path) -> dict[str, str]:
    """Variables that make every Python process name its run after the same second."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import time\nreal = time.strftime\n"
        f"time.strftime = lambda form, *rest: {SECOND!r} if form == '%Y%m%d-%H%M%S' else real(form, *rest)\n"
    )
    return {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def at_once(commands: list[list[str]], cwd: Path, variables: dict[str, str]) -> None:
    """Run commands at the same time. Each must finish with exit code 0."""
    processes = [
        subprocess.Popen(words, cwd=cwd, env=environment(**variables), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        for words in commands
    ]
    try:
        answers = [(*process.communicate(timeout=200), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [code for *_, code in answers] == [0] * len(commands), answers


def made(cwd: Path, name: str) -> list[str]:
    """The time stamps of all runs. Each run has finished."""
    folders = sorted((cwd / "runs").iterdir())
    assert all((folder / "results.json").is_file() for folder in folders), folders
    return [folder.name.removeprefix(f"{name}-") for folder in folders]


def claim_many(barrier: Barrier, folder: str, count: int) -> None:
    os.chdir(folder)
    barrier.wait()
    for _ in range(count):
        path = claim_run_folder("sweep")
        (path / f"owner-{os.getpid()}").touch()


def test_processes_that_claim_at_once_get_one_folder_each(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(AT_ONCE)
    processes = [context.Process(target=claim_many, args=(barrier, str(tmp_path), 40)) for _ in range(AT_ONCE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * AT_ONCE
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 40 * AT_ONCE
    assert all(len(list(folder.iterdir())) == 1 for folder in folders)


def test_threads_that_claim_at_once_get_one_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    barrier = threading.Barrier(8)

    def claim() -> list[Path]:
        barrier.wait()
        return [claim_run_folder("sweep") for _ in range(40)]

    with ThreadPoolExecutor(8) as pool:
        paths = [path for thread in [pool.submit(claim) for _ in range(8)] for path in thread.result()]
    assert len(set(paths)) == len(paths) == 8 * 40


@pytest.mark.long
def test_fake_clock_rehearsals_in_one_second_have_one_folder_each(tmp_path: Path) -> None:
    variables = stop_clock(tmp_path / "clock")
    words = [sys.executable, "-m", "paceline", "train", *QUICK, "--processes=1", "--rehearse"]
    at_once([words] * AT_ONCE, tmp_path, variables)
    assert made(tmp_path, "synthetic-mlp-rehearsal") == EXPECTED


@pytest.mark.long
def test_fake_clock_runs_under_torchrun_in_one_second_have_one_folder_each(tmp_path: Path) -> None:
    """The ranks of each run use the folder that their primary has claimed."""
    variables = stop_clock(tmp_path / "clock")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    at_once([[*launcher, "-m", "paceline", "train", *QUICK]] * 2, tmp_path, variables)
    assert made(tmp_path, "synthetic-mlp") == EXPECTED[:2]
    for folder in (tmp_path / "runs").iterdir():
        assert {path.name for path in (folder / "logs").glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}


def test_fake_clock_threads_of_one_program_train_in_one_folder_each(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom concurrent.futures import ThreadPoolExecutor\nimport paceline\n"
        "def train(seed):\n"
        "    return paceline.train('synthetic-mlp', num_samples=640, global_batch_size=64, epochs=1, processes=1,\n"
        "                          track=(), seed=seed, quiet=True)\n"
        "if __name__ == '__main__':\n"
        "    before = sys.stdout, sys.stderr\n"
        "    with ThreadPoolExecutor(3) as pool:\n"
        "        runs = list(pool.map(train, range(3)))\n"
        "    assert [run.config.train.seed for run in runs] == [0, 1, 2]\n"
        "    assert (sys.stdout, sys.stderr) == before\n"
    )
    at_once([[sys.executable, str(program)]], tmp_path, stop_clock(tmp_path / "clock"))
    assert made(tmp_path, "synthetic-mlp") == EXPECTED[:3]


def test_fake_slurm_jobs_submitted_in_one_second_have_one_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSlurm(tmp_path / "slurm", monkeypatch)
    clean_home(tmp_path, monkeypatch)
    variables = stop_clock(tmp_path / "clock")
    words = [sys.executable, "-m", "paceline", "submit", "slurm", "synthetic-mlp", "--site=", "--processes-per-node=1"]
    at_once([words] * AT_ONCE, tmp_path, variables)
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name.removeprefix("synthetic-mlp-") for folder in folders] == EXPECTED
    for folder in folders:  # the script and the record belong to this folder
        assert f"--output-dir {folder}" in (folder / "job.sbatch").read_text()
    assert len({(folder / "job.json").read_text() for folder in folders}) == AT_ONCE


def test_a_refused_request_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        run_verb("equivalence", ["synthetic-mlp", "--world-sizes=1,3", "--global-batch-size=64"])
    with pytest.raises(UserError):
        paceline.train("synthetic-mlp", global_batch_size=64, processes=3, quiet=True)
    proposed = decide_place(load_config("synthetic-mlp", []))
    with suppress(UserError), claimed(proposed) as place:
        assert place.folder.is_dir()
        raise UserError("refused")
    assert not RUNS.exists()


def test_a_plan_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    decide_place(load_config("synthetic-mlp", []))
    assert not RUNS.exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_runs_that_is_no_folder_is_one_screen(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RUNS.touch() if kind == "file" else RUNS.symlink_to("nowhere")
    with pytest.raises(UserError, match="cannot be created"):
        claim_run_folder("sweep")


def test_a_claimed_folder_without_a_checkpoint_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    claim_run_folder("sweep")
    assert newest_run_folder("sweep") is None
