"""README and the guides that use the clone's .venv: one clone, in the order of a new user.

README's `make train` creates .venv by the same Makefile rule as `make setup`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from harness.documents import REPOSITORY
from harness.guides import Newcomer, lines_of
from harness.slurm import need_slurm
from harness.torchvision_shim import ON_CPU

pytestmark = [pytest.mark.guides, pytest.mark.timeout(1200)]
ACTIVATE = ". .venv/bin/activate"
RUN_FILES = (
    "report.html",
    "results.json",
    "metrics.csv",
    "config.yaml",
    "tensorboard",
    "checkpoints",
    "logs/rank-0.log",
)


@pytest.fixture(scope="module")
def has_venv(reader: Newcomer) -> Newcomer:
    """The .venv of a contributor."""
    answer = reader.types([*lines_of("CONTRIBUTING.md", with_text="make setup", last="make setup"), ACTIVATE])
    assert answer.code == 0, answer.out + answer.err
    return reader


def new_runs(person: Newcomer, recipe: str, before: Iterable[Path] = ()) -> list[Path]:
    return sorted(set((person.clone / "runs").glob(f"{recipe}-*")) - set(before))


def missing_files(run: Path) -> list[str]:
    return [name for name in RUN_FILES if not (run / name).exists()]


def test_readme_trains(reader: Newcomer) -> None:
    """`make train` in an empty folder: a venv, a trained model, and all files that README names."""
    answer = reader.types(lines_of("README.md", with_text="make train", last="make train"))

    assert answer.code == 0, answer.out + answer.err
    (run,) = new_runs(reader, "shapes-cnn")
    assert missing_files(run) == []


def test_laptop_guide_and_its_line_for_torchrun(has_venv: Newcomer) -> None:
    """`paceline doctor` passes on this machine, and torchrun's ranks train."""
    page = "docs/guides/laptop.md"
    torchrun = lines_of(page, with_text="torchrun", last="torchrun")[-1]

    answer = has_venv.types([ACTIVATE, *lines_of(page, with_text="paceline doctor", last="paceline doctor"), torchrun])

    assert answer.code == 0, answer.out + answer.err
    (run,) = new_runs(has_venv, "synthetic-mlp")
    assert missing_files(run) == []


def test_course_starts_and_grades(has_venv: Newcomer) -> None:
    """The exercises are copied, the first lesson is shown, and its check names the unsolved parts (exit code 1)."""
    lines = lines_of("course/README.md", with_text="course start", last="paceline course check 1")

    answer = has_venv.types([ACTIVATE, *lines[:-1]])
    checked = has_venv.types([ACTIVATE, lines[-1]])

    assert answer.code == 0, answer.out + answer.err
    assert len(list((has_venv.clone / "course-work").glob("[0-9][0-9]_*"))) == 12
    assert checked.code == 1, checked.out + checked.err


def test_slurm_guide_writes_its_script_as_a_dry_run_without_gpus(has_venv: Newcomer, tmp_path: Path) -> None:
    """Its first command requests eight GPUs: --dry-run checks everything else and prints the script.

    The folder of the data set must exist. Here it is an empty one, for its download.
    """
    (line,) = lines_of("docs/guides/slurm.md", with_text="paceline submit slurm")
    assert line.count("/scratch/data") == 1

    answer = has_venv.types([ACTIVATE, f"{line.replace('/scratch/data', str(tmp_path))} --dry-run"])

    assert answer.code == 0, answer.out + answer.err
    assert "#SBATCH --nodes=2" in answer.out


@pytest.fixture
def slurm_state() -> Iterator[Path]:
    """The folder of the guide's cluster: not /var/lib, where a user may have one. Sockets need short paths."""
    need_slurm()
    state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        yield state
    finally:
        subprocess.run(
            [REPOSITORY / "tests/integrations/slurm/cluster/down", state], check=True, capture_output=True, timeout=150
        )


def test_slurm_from_nothing_trains_on_two_real_nodes(has_venv: Newcomer, slurm_state: Path, tmp_path: Path) -> None:
    """The cluster on one machine, the first commands of its user, and a training on both of its nodes."""
    page, before = "docs/guides/slurm-cluster.md", new_runs(has_venv, "shapes-cnn")
    lines = lines_of(page, with_text="make slurm-install")
    lines += lines_of(page, with_text="squeue ", last="srun")
    lines += lines_of(page, with_text="paceline submit slurm shapes-cnn")
    lines = [line.replace("/var/lib/paceline-slurm", str(slurm_state)) for line in lines]

    answer = has_venv.types(lines, SLURM_STATE=str(slurm_state), env=_with_sudo(tmp_path))

    assert answer.code == 0, answer.out + answer.err
    (run,) = new_runs(has_venv, "shapes-cnn", before)
    deadline = time.monotonic() + 300
    while not (run / "results.json").exists():
        log = "".join(path.read_text() for path in (run / "logs").glob("slurm-*.log"))
        assert time.monotonic() < deadline, log
        time.sleep(0.5)
    assert '"world_size": 2' in (run / "results.json").read_text()


def _with_sudo(folder: Path) -> dict[str, str]:
    """Root in a container has no sudo and does not need it."""
    if shutil.which("sudo"):
        return {}
    script = folder / "sudo"
    script.write_text('#!/bin/sh\nexec "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_own_model_installs_torchvision_and_plans_without_the_data(has_venv: Newcomer) -> None:
    """Into the existing .venv. The first command needs CIFAR-10 and a GPU: --dry-run checks all of it.

    With a CPU build of torch, torchvision can be imported only with a shim.
    """
    lines = lines_of("docs/guides/own-model.md", with_text="pip install", last="paceline train")
    comment = lines[-1].index("#")

    answer = has_venv.types([ACTIVATE, *lines[:-1], f"{lines[-1][:comment]} --dry-run"], PYTHONPATH=str(ON_CPU))

    assert answer.code == 0, answer.out + answer.err


def test_object_stores_install_and_plan_without_a_bucket(has_venv: Newcomer) -> None:
    """Into the existing .venv. The first command needs a bucket: --dry-run checks all of it."""
    lines = lines_of("docs/guides/object-stores.md", with_text="pip install")

    answer = has_venv.types([ACTIVATE, *lines[:-1], f"{lines[-1]} --dry-run"])

    assert answer.code == 0, answer.out + answer.err
