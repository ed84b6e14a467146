"""Faults 2, 3, 4: stop requests by a user or a scheduler, and the death of the launcher."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.processes import Started, processes_in, seconds_until_empty, started
from harness.short_run import FLAGS, injected_faults, outcome, read_json
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.runtime.pulse import read_pulse
from paceline.runtime.slurm import job_to_requeue, returns_without_progress

# Three seconds if no other test runs at the same time.
GONE_S = 3 if "PYTEST_XDIST_WORKER" not in os.environ else 10


def last_step(run: Started) -> int:
    return int([line for line in run.lines if line.startswith("step ")][-1].split()[1].partition("/")[0])


def check_saved_stop(run: Started, folder: Path, reason: str) -> None:
    """The run saved at the step at which it stopped. The checkpoint is complete."""
    status = read_json(folder / "run" / "status.json")
    state = "stopped" if reason == "interrupted by the user" else "preempted"
    assert (status["status"], status["reason"]) == (state, reason)
    newest = step_folders(folder / "run" / "checkpoints")[0]
    assert step_of(newest) == status["step"] == last_step(run)
    verify(newest)


def resume_to_the_end(folder: Path, undisturbed: dict[str, object]) -> None:
    answer = paceline(*FLAGS, "--resume=auto", cwd=folder)
    assert answer.code == 0, answer
    assert outcome(folder / "run") == undisturbed


# Fault 3
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.faults) for number in (signal.SIGUSR1, signal.SIGUSR2))],
)
def test_a_stop_request_saves_and_the_run_can_resume(
    number: signal.Signals, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 12/")
        os.kill(run.process.pid, number)
        if number is signal.SIGTERM:
            os.kill(run.process.pid, number)  # a second signal changes nothing
        sent_at, step = time.monotonic(), last_step(run)
        assert run.wait() == 75, run.err
        # The documented two seconds are for stop and save. This time includes the end of six processes.
        assert time.monotonic() - sent_at <= 1 + GONE_S
        assert last_step(run) <= step + 3  # the current step, one step to agree, lines still in the pipe
        check_saved_stop(run, tmp_path, number.name)
        assert f"stopped at step {last_step(run)} and saved ({number.name})" in run.err
    if number is signal.SIGTERM:
        resume_to_the_end(tmp_path, undisturbed)


@pytest.mark.faults
def test_a_signal_to_one_rank_stops_all_ranks_at_one_step(tmp_path: Path) -> None:
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 9/")
        os.kill(run.ranks()[1], signal.SIGUSR1)
        assert run.wait() == 75, run.err
        check_saved_stop(run, tmp_path, "SIGUSR1")


@pytest.mark.faults
def test_signals_to_all_processes_at_once(tmp_path: Path) -> None:
    # Like Slurm: every process of the job gets the signal, including the supervisor's servers.
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 9/")
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait() == 75, run.err
        check_saved_stop(run, tmp_path, "SIGTERM")


@pytest.mark.faults
def test_the_run_trains_during_its_notice(tmp_path: Path) -> None:
    with started(*FLAGS, "--epochs=30", "--notice-s=6", cwd=tmp_path) as run:
        run.wait_for("step 9/")
        os.kill(run.process.pid, signal.SIGTERM)
        sent_at = time.monotonic()
        assert run.wait() == 75, run.err
        assert 3 <= time.monotonic() - sent_at <= 6.5  # it continued for a while, and ended before the kill
        assert last_step(run) > 30
        check_saved_stop(run, tmp_path, "SIGTERM")


# Fault 2
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 12/")
        run.process.kill()
        assert seconds_until_empty(tmp_path, limit_s=20) <= GONE_S
        check_saved_stop(run, tmp_path, "the supervisor died")


@pytest.mark.faults
@pytest.mark.parametrize("script", [False, True], ids=["python", "script"])
def test_ranks_do_not_outlive_torchrun(script: bool, tmp_path: Path) -> None:
    """The agent is killed, with or without a shell script between it and the ranks. The ranks save and end."""
    command = ["-m", "paceline"]
    if script:
        (tmp_path / "start.sh").write_text(f'#!/bin/sh\n{sys.executable} -m paceline "$@"\nexit $?\n')
        (tmp_path / "start.sh").chmod(0o755)
        command = ["--no-python", "./start.sh"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    flags = [flag for flag in FLAGS if "processes" not in flag]
    with started(*flags, "--epochs=200", cwd=tmp_path, launcher=torchrun) as run:
        run.wait_for("step 12/")
        run.process.kill()
        seconds_until_empty(tmp_path, limit_s=20)
        check_saved_stop(run, tmp_path, "torchrun died")


@pytest.mark.faults
def test_interrupt_saves_and_leaves_no_process_behind(tmp_path: Path) -> None:
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 12/")
        os.killpg(run.process.pid, signal.SIGINT)  # like a terminal on Ctrl-C
        assert seconds_until_empty(tmp_path, limit_s=10) <= 3
        assert run.wait() == 130
        check_saved_stop(run, tmp_path, "interrupted by the user")
        assert [line.partition(" ")[0] for line in run.err.split("\n") if line] == ["stopping", "stopped"], run.err


@pytest.mark.faults
@pytest.mark.parametrize("flags", [(), ("--resume=auto", "--load-policy=none")], ids=["plain", "load-policy-none"])
def test_the_printed_command_continues_with_the_same_settings(
    flags: tuple[str, ...], tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    """Like a user who pastes it: no flag of the first start is repeated."""
    with started(*FLAGS, *flags, cwd=tmp_path) as run:
        run.wait_for("step 12/")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
        words = shlex.split(run.err.partition("continue with: ")[2])
    assert words[0] == "paceline"
    answer = paceline(*words[1:], cwd=tmp_path)
    assert answer.code == 0, answer
    assert outcome(tmp_path / "run") == undisturbed


def wait_for_processes(run: Started, number: int) -> None:
    """Two: the fork server has just started and imports torch. Four and more: ranks that are starting."""
    deadline = time.monotonic() + 60
    while len(processes_in(run.folder)) < number:
        assert time.monotonic() < deadline, run.err


@pytest.mark.faults
@pytest.mark.parametrize("processes", [2, 3, 4, 5], ids=["tracker", "server", "first-rank", "second-rank"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)], ids=["INT", "TERM"])
def test_a_stop_before_the_first_step_is_a_stop_and_not_a_failure(
    number: signal.Signals, code: int, processes: int, tmp_path: Path
) -> None:
    """The exit code is that of any other stop request, so a scheduler restarts the run."""
    with started(*FLAGS, cwd=tmp_path) as run:
        wait_for_processes(run, processes)
        os.killpg(run.process.pid, number)
        assert run.wait(timeout_s=30) == code, run.err
        assert "Traceback" not in run.err
        assert "failed" not in run.err
        seconds_until_empty(tmp_path, limit_s=10)


def wait_for_pulses(run: Started, attempts: Path, number: int) -> None:
    """Wait until this number of ranks has started."""
    deadline = time.monotonic() + 60
    while sum(read_pulse(path) is not None for path in attempts.glob("paceline-attempt-*/rank-*.pulse")) < number:
        assert time.monotonic() < deadline, run.err


@pytest.mark.faults
@pytest.mark.parametrize("has_begun", [0, 1])
def test_a_stop_while_ranks_start_is_not_a_failure(has_begun: int, tmp_path: Path) -> None:
    """One rank handles signals already, or none does. The other is suspended before: exit code 75, no failure."""
    with (
        tempfile.TemporaryDirectory(
            dir="/tmp", ignore_cleanup_errors=True
        ) as short,  # the path of a socket has a length limit
        started(*FLAGS, cwd=tmp_path, TMPDIR=short) as run,
    ):
        deadline = time.monotonic() + 60
        while len(ranks := run.ranks()) < 2:
            assert time.monotonic() < deadline, run.err
        for rank in ranks[has_begun:]:
            os.kill(rank, signal.SIGSTOP)  # before its first pulse, which takes much longer
        wait_for_pulses(run, Path(short), has_begun)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(timeout_s=120) == 75, run.err
        assert "not sent by paceline" not in run.err
        assert "failed" not in run.err
    assert not (tmp_path / "run" / "failures.jsonl").exists()
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["status"], status["reason"], status["step"]) == ("preempted", "SIGTERM", 0)


def test_a_stop_during_the_imports_of_the_supervisor(tmp_path: Path) -> None:
    """The command has started its imports: exit code 75, as later."""
    with started(*FLAGS, cwd=tmp_path) as run:
        deadline = time.monotonic() + 60
        while not handles(run.process.pid, signal.SIGTERM):
            assert time.monotonic() < deadline, run.err
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(timeout_s=30) == 75, run.err
        seconds_until_empty(tmp_path, limit_s=10)


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)


@pytest.mark.faults
def test_a_stop_just_after_resuming_reports_its_own_reason(tmp_path: Path) -> None:
    with started(*FLAGS, cwd=tmp_path) as run:
        run.wait_for("step 12/")
        os.kill(run.process.pid, signal.SIGUSR1)
        assert run.wait() == 75, run.err
    before = read_json(tmp_path / "run" / "status.json")
    with started(*FLAGS, "--resume=auto", cwd=tmp_path) as run:
        wait_for_processes(run, 4)  # the first rank has started and has written nothing yet
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(timeout_s=30) == 75, run.err
    assert "(SIGTERM)" in run.err
    assert "SIGUSR1" not in run.err
    assert read_json(tmp_path / "run" / "status.json") == before  # it did not train, so the status is unchanged


def interrupt_while_it_hangs(run: Started) -> None:
    """Send Ctrl-C after the fault was injected. Waits for the supervisor's message, because two signals can merge."""
    run.wait_for("step 11/")
    deadline = time.monotonic() + 20
    saved = run.folder / "run" / "checkpoints" / "step-00000010"
    while not ((run.folder / "run" / "faults.jsonl").exists() and saved.exists()):  # saved in the background
        assert time.monotonic() < deadline
    os.killpg(run.process.pid, signal.SIGINT)
    while "Ctrl-C again" not in run.err:
        assert time.monotonic() < deadline


@pytest.mark.faults
def test_an_interrupt_waits_for_a_slow_save(tmp_path: Path) -> None:
    with started(*FLAGS, "--inject=slow-disk rank=0 step=12 seconds=4", cwd=tmp_path) as run:
        run.wait_for("step 12/")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
        check_saved_stop(run, tmp_path, "interrupted by the user")
    assert injected_faults(tmp_path / "run") == ["slow-disk (rank 0, step 12)"]


@pytest.mark.faults
def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    # The ranks hang, so they never reach a step boundary.
    with started(*FLAGS, "--inject=hang rank=1 step=12", cwd=tmp_path) as run:
        interrupt_while_it_hangs(run)
        os.killpg(run.process.pid, signal.SIGINT)
        assert seconds_until_empty(tmp_path, limit_s=10) <= 3
        assert run.wait() == 130
        assert "the newest checkpoint is of step 10" in run.err


@pytest.mark.faults
def test_an_interrupt_of_ranks_that_hang_ends_after_its_grace(tmp_path: Path) -> None:
    """Ranks get 30 s to save. Ranks that hang are ended then."""
    with started(*FLAGS, "--inject=hang rank=1 step=12", cwd=tmp_path) as run:
        interrupt_while_it_hangs(run)
        assert 25 <= seconds_until_empty(tmp_path, limit_s=45) <= 35
        assert run.wait() == 130


# Fault 4
def write_fake_scontrol(folder: Path) -> Path:
    (folder / "bin").mkdir()
    script = folder / "bin" / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls.txt\n')
    script.chmod(0o755)
    return folder / "calls.txt"


@pytest.mark.parametrize(
    ("slurm", "calls"),
    [
        ({"SLURM_JOB_ID": "71"}, ["requeue 71"]),
        ({"SLURM_JOB_ID": "72", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2"}, ["requeue 70_2"]),
        ({}, []),
    ],
    ids=["job", "array", "laptop"],
)
@pytest.mark.faults
def test_a_fake_slurm_warning_requeues_once(tmp_path: Path, slurm: dict[str, str], calls: list[str]) -> None:
    file = write_fake_scontrol(tmp_path)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with started(*FLAGS, cwd=tmp_path, PATH=path, **slurm) as run:
        run.wait_for("step 9/")
        os.kill(run.process.pid, signal.SIGUSR1)
        os.kill(run.process.pid, signal.SIGUSR1)
        assert run.wait() == 75, run.err
    assert (file.read_text().splitlines() if file.exists() else []) == calls


def test_which_jobs_are_requeued() -> None:
    job = {"SLURM_JOB_ID": "7"}
    assert job_to_requeue("SIGUSR1", job) == "7"
    assert job_to_requeue("SIGUSR2", {**job, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}) == "5_0"
    assert job_to_requeue("SIGTERM", job) is None  # Slurm itself requeues preempted jobs
    assert job_to_requeue("SIGUSR1", {**job, "SLURM_NODEID": "1"}) is None
    assert job_to_requeue("SIGUSR1", {}) is None


def test_a_job_without_progress_is_not_requeued(tmp_path: Path) -> None:
    path = tmp_path / "requeues.jsonl"
    assert returns_without_progress(path, 10) == 0
    path.write_text("".join(f'{{"job": "7", "step": {step}}}\n' for step in (5, 10, 10)))
    assert returns_without_progress(path, 10) == 2
    assert returns_without_progress(path, 11) == 0
