"""The scripts that `paceline submit slurm` and studies write pass shellcheck, for any request."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from harness.shellcheck import check_script
from paceline.integrations.slurm.script import write_array_script, write_script
from paceline.launch.job import JobSpec
from paceline.tools.doctor.start import _ON_NODE

PLAIN = JobSpec(
    name="shapes-cnn",
    folder=Path("/home/ada/runs/first"),
    work_dir=Path("/home/ada"),
    train=("shapes-cnn", "--epochs=2"),
    python="/home/ada/.venv/bin/python",
    nodes=2,
    ranks_per_node=4,
    cpus_per_task=4,
    time="00:10:00",
)
# One change each, combined with each way of starting, one node or two, and with or without --resume.
CHANGES: dict[str, dict[str, object]] = {
    "plain": {},
    "GPUs": {"gpus": "a100:4"},
    "gres": {"gpus": "4", "gres": "gpu:4"},
    "container": {"container_image": "site/image:1", "container_mounts": ("/home/ada:/home/ada", "/data:/data")},
    "container file": {"container_image": "/images/my image.sqsh", "container_mounts": ("/my data:/my data",)},
    "environment": {"environment": "/home/ada/my edf.toml"},
    "modules": {"modules": ("cuda/12.4", "gcc 13")},
    "conda": {"conda": "my env"},
    "venv": {"venv": "/home/ada/my env"},
    "variables": {"env": ("NCCL_DEBUG=INFO", "A=it's $HOME `x` \\ *", "SECRET")},
    "exclusive": {"sbatch": ("--exclusive", "--comment='two words'")},
    "accounts": {"account": "lab", "partition": "a,b", "qos": "long", "constraint": "a100&ib", "reservation": "r"},
    "memory": {"mem": "64G"},
    "resume from": {"resume": "/home/ada/other run/checkpoints/best"},
    "no notice": {"signal_notice_s": 0},
    "no requeue": {"max_requeues": 0},
    "array": {"array": "0-7%2"},
    "names with quotes": {"folder": Path('/home/ada/it\'s "my" $run; `x` #1'), "work_dir": Path("/home/a b")},
    "arguments with quotes": {"train": ("my recipe.yaml", "--note=it's $5 & more", "--weights=*.pt")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_job_script_passes_shellcheck(name: str) -> None:
    """Each setting with each way of starting, on one node and on two, with and without a resume."""
    resumes = (PLAIN.resume, "") if "resume" not in CHANGES[name] else (str(CHANGES[name]["resume"]),)
    for start, nodes, resume in product(("agent", "ranks", "torchrun"), (1, 2), resumes):
        spec = replace(PLAIN, start=start, nodes=nodes, **{**CHANGES[name], "resume": resume})  # type: ignore[arg-type]
        check_script(write_script(spec))


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "array"])
def test_a_script_of_a_study_passes_shellcheck(name: str) -> None:
    """An array of commands from a file."""
    for nodes in (1, 2):
        settings = {**CHANGES[name], "resume": "", "signal_notice_s": 0}
        spec = replace(PLAIN, nodes=nodes, **settings)  # type: ignore[arg-type]
        commands = [["train", "shapes-cnn", f"--output-dir=cells/it's {number}"] for number in range(2)]
        script, _ = write_array_script(spec, commands, Path("/home/ada/my study/jobs/2-ranks.commands"))
        check_script(script)


def test_the_command_of_doctor_on_a_node_passes_shellcheck() -> None:
    """It runs in bash on each node before the ranks."""
    check_script(f"#!/bin/bash\n{_ON_NODE}\n")
