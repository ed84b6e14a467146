"""A supervisor is killed, its ranks are orphans, and the next start follows at once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.cli import command, environment, paceline
from harness.processes import Started, processes_in, started
from harness.runs import read_results
from harness.short_run import FLAGS, outcome
from paceline.checkpoints.format import step_folders, step_of
from paceline.errors import EXIT_INTERRUPTED

pytestmark = pytest.mark.faults


@contextmanager
def killed_supervisor(folder: Path, *flags: str, at: str = "step 12/") -> Iterator[list[int]]:
    """Kill a supervisor. Returns the process ids of its ranks, which live for a while."""
    with started(*FLAGS, *flags, cwd=folder) as run:
        run.wait_for(at)
        ranks = wait_for_ranks(run)
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait()
        yield ranks


def wait_for_ranks(run: Started) -> list[int]:
    ranks = run.ranks()
    assert len(ranks) == 2
    return ranks


def test_a_start_after_a_killed_supervisor_waits_for_the_last_save_of_its_ranks(
    tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    """The orphans still own the run and save at their next step. The new start resumes from there, alone."""
    with killed_supervisor(tmp_path, "--inject=slow rank=1 step=13 seconds=7") as ranks:
        assert set(ranks) <= set(processes_in(tmp_path))  # the fault took effect: the orphans exist
        answer = paceline(*FLAGS, "--inject=", "--resume=auto", cwd=tmp_path)
        assert answer.code == 0, answer
        assert set(ranks).isdisjoint(processes_in(tmp_path))
    resumed = re.search(r"^resumed   at step (\d+) ", answer.out, re.MULTILINE)
    assert resumed is not None, answer.out
    assert int(resumed[1]) in (13, 14)  # the checkpoint before is of step 10
    assert outcome(tmp_path / "run") == undisturbed


def test_a_copy_of_a_live_run_starts_under_torchrun_and_leaves_the_original_alone(tmp_path: Path) -> None:
    """The copy contains the records of the original's processes. They are not members of the copy and not ended."""
    live = tmp_path / "live"
    live.mkdir()
    with started(*FLAGS, "--inject=hang rank=1 step=13", cwd=live) as run:
        run.wait_for("step 12/")
        ranks = wait_for_ranks(run)
        shutil.copytree(live / "run", tmp_path / "run", symlinks=True, ignore=shutil.ignore_patterns(".*tmp*"))
        assert len(list((tmp_path / "run" / ".members").iterdir())) == 3
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        flags = [flag for flag in FLAGS if not flag.startswith("--processes")]
        answer = command(
            *(sys.executable, *launcher, "-m", "paceline", *flags, "--inject=", "--resume=auto"),
            cwd=tmp_path,
            OMP_NUM_THREADS="1",
            timeout_s=60,
        )
        assert answer.code == 0, answer
        assert run.process.poll() is None
        assert set(ranks) <= set(processes_in(live))
    assert read_results(tmp_path / "run")["status"] == "finished"


def test_a_live_run_whose_lock_file_was_deleted_is_not_taken_over(tmp_path: Path) -> None:
    """A second start is refused because of the process records, and the first run continues."""
    with started(*FLAGS, "--inject=slow rank=1 step=13 seconds=10", cwd=tmp_path) as run:
        run.wait_for("step 12/")
        (tmp_path / "run" / "run.lock").unlink()
        answer = paceline(*FLAGS, "--inject=", "--resume=auto", cwd=tmp_path)
        assert answer.code == 2, answer
        assert f" pid {run.process.pid} since" in answer.err
        assert run.wait() == 0
    assert read_results(tmp_path / "run")["status"] == "finished"


def test_suspended_orphans_are_ended_by_the_next_start(tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """Suspended ranks cannot save. They are ended before the new start begins, and never write again."""
    with killed_supervisor(tmp_path, "--inject=hang rank=1 step=13") as ranks:
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        newest = step_folders(tmp_path / "run" / "checkpoints")[0]  # the save of step 10 may not be complete
        answer = paceline(*FLAGS, "--inject=", "--resume=auto", cwd=tmp_path)
        assert answer.code == 0, answer
        assert set(ranks).isdisjoint(processes_in(tmp_path))
    assert f"resumed   at step {step_of(newest)} " in answer.out, answer.out
    assert outcome(tmp_path / "run") == undisturbed
    assert read_results(tmp_path / "run")["status"] == "finished"


def test_an_interrupt_ends_a_start_that_waits_for_orphans(tmp_path: Path) -> None:
    """The start owns nothing yet, so the orphans and their owner record stay unchanged."""
    with killed_supervisor(tmp_path, "--inject=hang rank=1 step=13") as ranks:
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        words = (tmp_path / "run" / "run.lock").read_text()
        with subprocess.Popen(
            [sys.executable, "-m", "paceline", *FLAGS, "--resume=auto"],
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as second:
            assert second.stderr is not None
            assert "of the previous owner" in second.stderr.readline()
            os.kill(second.pid, signal.SIGINT)
            assert second.wait(9) == EXIT_INTERRUPTED
        assert (tmp_path / "run" / "run.lock").read_text() == words
        assert set(ranks) <= set(processes_in(tmp_path))


def test_a_second_start_during_a_long_save_of_orphans_loses_no_checkpoint(
    tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    """Orphans that outlive the grace lose the run. Their save changes nothing of the new run."""
    with killed_supervisor(tmp_path, "--inject=slow rank=0 step=13 seconds=60") as ranks:
        answer = paceline(*FLAGS, "--inject=", "--resume=auto", cwd=tmp_path)
        assert answer.code == 0, answer
        assert set(ranks).isdisjoint(processes_in(tmp_path))
    assert "resumed   at step 10" in answer.out, answer.out
    assert outcome(tmp_path / "run") == undisturbed
    assert not list((tmp_path / "run" / "checkpoints").glob("superseded-*"))
