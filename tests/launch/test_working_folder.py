"""A file in the working folder never replaces a module of Python or of Paceline."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import command
from paceline.integrations.kubernetes.job import KubernetesJob
from paceline.integrations.kubernetes.template import build_pod
from paceline.integrations.kubernetes.values import Volume
from paceline.integrations.slurm.script import write_script
from paceline.launch.job import JobSpec

PACELINE = str(Path(sys.executable).with_name("paceline"))  # `python -m` itself would put the folder on the path
QUICK = ["--num-samples=640", "--global-batch-size=64", "--epochs=1", "--track"]


# A fake srun for one node: it starts the command.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""


def write_modules(folder: Path) -> None:
    """Files with names of modules. Each creates a file when it is imported."""
    for name in ("torch", "yaml", "random", "tempfile", "numpy", "multiprocessing", "paceline"):
        text = f"open({str(folder / 'imported')!r}, 'a').write({name!r})\nraise ImportError('injected')\n"
        (folder / f"{name}.py").write_text(text)


def require_none_imported(folder: Path) -> None:
    assert not (folder / "imported").exists(), (folder / "imported").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "synthetic-mlp", *QUICK, "--processes=1", "--output-dir=run"],
        ["equivalence", "synthetic-mlp", *QUICK, "--world-sizes=1,2", "--max-steps=2", "--output-dir=runs"],
        ["study", "synthetic-mlp", *QUICK, "--world-sizes=1", "--repeats=1", "--strategies=ddp", "--output-dir=study"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_modules_in_the_working_folder_are_not_imported(arguments: list[str], tmp_path: Path) -> None:
    """Not by the command, and not by its child processes."""
    write_modules(tmp_path)
    answer = command(PACELINE, *arguments, cwd=tmp_path)
    require_none_imported(tmp_path)
    assert answer.code == 0, answer


@pytest.mark.parametrize("start", ["agent", "ranks", "torchrun"])
def test_fake_srun_modules_in_the_working_folder_are_not_imported_by_a_job(start: Any, tmp_path: Path) -> None:
    """Not by the check of the nodes, not by the processes of the script, and not by the ranks."""
    clients = tmp_path / "clients"
    clients.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (clients / name).write_text(text)
        (clients / name).chmod(0o755)
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    write_modules(work_dir)
    train = ("synthetic-mlp", *QUICK)
    spec = JobSpec(folder=tmp_path / "run", work_dir=work_dir, train=train, python=sys.executable, start=start)
    (tmp_path / "job.sbatch").write_text(write_script(replace(spec, nodes=1, ranks_per_node=1)))
    variables = {"PATH": f"{clients}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost"}
    (tmp_path / "run").mkdir()
    answer = command("bash", str(tmp_path / "job.sbatch"), cwd=work_dir, OMP_NUM_THREADS="1", env=variables)
    require_none_imported(work_dir)
    assert answer.code == 0, answer
    assert (tmp_path / "run" / "results.json").is_file()


@pytest.mark.parametrize("nodes", [1, 2])
def test_modules_in_the_working_folder_are_not_imported_by_a_pod(nodes: int, tmp_path: Path) -> None:
    """The command of the container, with this python. A pod of two nodes ends at once, because it has no gang."""
    job = KubernetesJob(
        name="job",
        image="image",
        runs=Volume("claim", "/runs"),
        nodes=nodes,
        processes_per_node=1,
        train=("synthetic-mlp", *QUICK),
    )
    (container,) = build_pod(job)["containers"]
    write_modules(tmp_path)
    words = [sys.executable, *container["command"][1:], *container["args"]]
    answer = command(*words, *(["--processes=1", "--output-dir=run"]), cwd=tmp_path)
    require_none_imported(tmp_path)
    assert (answer.code == 0) == (nodes == 1), answer
