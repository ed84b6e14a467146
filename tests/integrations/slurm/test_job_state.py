"""status, watch, cancel and logs: of jobs in every state, without accounting, and of runs without Slurm."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.fake_slurm import FakeSlurm, clean_home
from paceline.checkpoints.store import commit, temporary_folder
from paceline.cli.main import main
from paceline.integrations.slurm.client import JobState, SlurmUnavailable, read_state
from paceline.launch.job_record import JobRecord, read_record
from paceline.runs.folder import RunFolder
from paceline.runs.owner import this_process

USER, PREEMPTED, INTERRUPTED = 2, 75, 130
PENDING = "4711|PENDING|Priority|2026-11-20T08:00:00|0:00|2:00:00|"
RUNNING = "4711|RUNNING|None|2026-11-15T08:00:00|4:10|1:55:50|n[1-2]"
COMPLETED = "4711|COMPLETED|None|2026-11-15T08:00:00|9:10|1:50:50|n[1-2]"
DETAILS = (
    "JobId=4711 JobName=x JobState={state} Reason=None Requeue=1 Restarts={restarts} ExitCode={code} NodeList=n[1-2]"
)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def details(state: str, restarts: int = 0, code: str = "0:0") -> str:
    return DETAILS.format(state=state, restarts=restarts, code=code)


def make_run(path: Path, status: dict[str, Any] | None = None, *, job_id: str = "4711") -> RunFolder:
    """A run folder as `submit` and `train` create it."""
    folder = RunFolder(path)
    folder.create()
    if job_id:
        JobRecord(job_id, "", str(path / "job.sbatch"), ["paceline"]).write(path)
    if status is not None:
        folder.config.write_text("dataset: 'shapes'\n")
        folder.write_status(status.pop("status"), **status)
    return folder


def reported(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


# --- The clients ------------------------------------------------------------------------------------------------------


def test_fake_queue_knows_the_job(fake: FakeSlurm) -> None:
    fake.answer("squeue", PENDING)
    fake.answer("scontrol", details("PENDING", restarts=2))
    state = read_state("4711")
    assert state == JobState(
        "4711", state="PENDING", reason="Priority", expected_start="2026-11-20T08:00:00", restarts=2
    )
    assert state.is_active
    assert fake.calls("sacct") == []
    fake.answer("squeue", RUNNING)
    state = read_state("4711")
    assert (state.state, state.nodes, state.running_for, state.time_left) == ("RUNNING", "n[1-2]", "4:10", "1:55:50")
    assert state.reason == ""


def test_fake_cluster_of_several(fake: FakeSlurm) -> None:
    fake.answer("squeue", RUNNING)
    read_state("4711", "lab")
    assert all("--clusters=lab" in call for call in fake.calls("squeue") + fake.calls("scontrol"))


def test_fake_controller_knows_jobs_that_left_the_queue(fake: FakeSlurm) -> None:
    fake.answer("squeue", "", err="slurm_load_jobs error: Invalid job id specified", code=1)
    fake.answer("scontrol", details("FAILED", code="5:0"))
    state = read_state("4711")
    assert (state.state, state.nodes, state.exit_code, state.is_active) == ("FAILED", "n[1-2]", "5:0", False)


def test_fake_accounting_knows_old_jobs(fake: FakeSlurm) -> None:
    fake.forget_job()
    (fake.folder / "sacct.1.sh").write_text("echo 'CANCELLED by 1000|n[1-2]|0:15'\n")
    state = read_state("4711")
    assert (state.state, state.nodes, state.exit_code) == ("CANCELLED", "n[1-2]", "0:15")


def test_without_accounting_the_fake_file_of_completed_jobs(fake: FakeSlurm) -> None:
    fake.forget_job()
    fake.answer("sacct", "TIMEOUT|n1")
    state = read_state("4711")
    assert (state.state, state.nodes) == ("TIMEOUT", "n1")
    assert ["--completion" in call for call in fake.calls("sacct")] == [False, True]


def test_a_fake_job_that_no_client_knows(fake: FakeSlurm) -> None:
    fake.forget_job()
    assert read_state("4711") == JobState("4711")
    (fake.folder / "sacct").unlink()
    assert read_state("4711") == JobState("4711")


def test_fake_controller_is_unreachable(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.answer("squeue", "", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    with pytest.raises(SlurmUnavailable, match="squeue failed"):
        read_state("4711")
    monkeypatch.setattr("paceline.integrations.slurm.client.CLIENT_TIMEOUT_S", 0.3)
    fake.hang("squeue")
    began_s = time.perf_counter()
    with pytest.raises(SlurmUnavailable, match=r"squeue did not answer within 0\.3 s"):
        read_state("4711")
    assert time.perf_counter() - began_s < 4


def test_fake_array_is_counted(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        "4711_0|COMPLETED|None|x|1:00|0|n1",
        "4711_1|RUNNING|None|x|1:00|9:00|n2",
        "4711_[2-3]|PENDING|R|N/A|0:00||",
    ]
    fake.answer("squeue", "\n".join(rows))
    state = read_state("4711")
    assert (state.state, state.nodes) == ("RUNNING", "n2")
    assert state.tasks == {"COMPLETED": 1, "RUNNING": 1, "PENDING": 1}
    folder = make_run(tmp_path / "run")
    JobRecord("4711", "", "", [], array="0-3").write(folder.path)
    text = reported(capsys, "status", "run")
    assert text.startswith("run: running\n")
    assert "job:      4711: 1 completed, 1 running, 1 pending" in text
    fake.answer("squeue", "\n".join([rows[0], rows[0].replace("COMPLETED", "FAILED")]))
    assert "run: ended\n" in reported(capsys, "watch", "run", code=70)
    fake.answer("squeue", "\n".join([rows[0], rows[0]]))
    assert "2 completed" in reported(capsys, "watch", "run")
    task = make_run(folder.path / "task-2", {"status": "running", "step": 5}, job_id="")
    record = read_record(task.path)
    assert record is not None
    assert record.job_id == "4711_2"
    assert read_record(make_run(folder.path / "other", job_id="").path) is None


# --- status -----------------------------------------------------------------------------------------------------------


def test_queued_in_the_fake_queue(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    fake.answer("squeue", PENDING)
    fake.answer("scontrol", details("PENDING", restarts=2))
    text = reported(capsys, "status", "run")
    assert text.startswith("run: queued\n")
    why = "Priority: jobs with a higher priority are first"
    assert f"4711: pending ({why}), expected to start 2026-11-20 08:00:00; requeued 2 times" in text


def test_running_in_the_fake_queue(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = {"status": "running", "step": 700, "last_step": 1400, "eta_s": 190.0}
    folder = make_run(tmp_path / "run", status)
    temporary_folder(folder.checkpoints, 600).mkdir()
    commit(temporary_folder(folder.checkpoints, 600), {}, b'{"step": 600}', {})
    (folder.checkpoints / "step-00000650").mkdir()  # incomplete
    failure = {"attempt": 1, "attempts": 4, "what": "rank 1 was ended by SIGKILL\nmore", "done": "started again"}
    folder.failure.write_text(json.dumps(failure))
    fake.answer("squeue", RUNNING)
    fake.answer("scontrol", details("RUNNING", restarts=1))
    text = reported(capsys, "status", "run")
    assert text.startswith("run: running, step 700 of 1,400 (50%), about 3 min left\n")
    assert "  job:      4711: running on n[1-2] for 4:10, 1:55:50 left; requeued 1 time\n" in text
    assert "  saved:    step 600\n" in text
    assert "  failure:  attempt 1 of 4: rank 1 was ended by SIGKILL; started again\n" in text
    content = json.loads(reported(capsys, "status", "run", "--json"))
    assert (content["state"], content["is_over"], content["saved_step"]) == ("running", False, 600)
    assert content["job"]["nodes"] == "n[1-2]"
    assert content["status"]["step"] == 700
    assert content["failure"] == failure


@pytest.mark.parametrize(
    ("status", "row", "scontrol", "state", "part"),
    [
        ({"status": "finished", "step": 840}, COMPLETED, details("COMPLETED"), "finished", "4711: completed on n[1-2]"),
        ({"status": "preempted", "step": 7}, PENDING, details("PENDING", 1), "queued", "requeued 1 time"),
        ({"status": "running", "step": 7}, COMPLETED.replace("COMPLETED", "TIMEOUT"), "", "failed", "4711: timeout"),
        ({"status": "running", "step": 7}, COMPLETED, "", "lost", "4711: completed"),
        ({"status": "running", "step": 7}, COMPLETED.replace("COMPLETED", "CANCELLED"), "", "cancelled", "cancelled"),
        ({"status": "preempted", "step": 7}, COMPLETED.replace("COMPLETED", "CANCELLED"), "", "preempted", "step 7"),
        ({"status": "failed", "reason": "boom"}, "", details("FAILED", 0, "5:0"), "failed", "exit code 5:0"),
        (None, RUNNING, details("RUNNING"), "starting", "4711: running on n[1-2]"),
        (None, "", "", "lost", "Slurm does not know it any more"),
    ],
)
def test_states_with_a_fake_queue(
    status: dict[str, Any] | None,
    row: str,
    scontrol: str,
    state: str,
    part: str,
    fake: FakeSlurm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path / "run", dict(status) if status else None)
    fake.answer("squeue", row, err="" if row else "Invalid job id specified", code=0 if row else 1)
    fake.answer("scontrol", scontrol, code=0 if scontrol else 1)
    text = reported(capsys, "status", "run")
    assert text.startswith(f"run: {state}"), text
    assert part in text


def test_status_of_the_run_while_fake_slurm_is_unreachable(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", {"status": "running", "step": 7})
    fake.answer("squeue", "", err="Unable to contact slurm controller", code=1)
    text = reported(capsys, "status", "run")
    assert text.startswith("run: running, step 7\n")
    assert "4711: squeue failed" in text


def test_runs_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no client anywhere
    folder = make_run(
        tmp_path / "runs" / "one", {"status": "finished", "step": 840, "test_accuracy": 0.9915}, job_id=""
    )
    assert reported(capsys, "status", "runs/one").startswith("runs/one: finished, step 840, test accuracy 99.15%\n")
    assert reported(capsys, "status", "one").startswith("runs/one: finished"), "its name is enough"
    folder.write_status("running", step=7)
    gone = {**asdict(this_process()), "process_start": "1"}  # this process id, but an earlier process
    folder.lock.write_text(json.dumps(gone))
    text = reported(capsys, "status", "one")
    assert text.startswith("runs/one: lost, step 7\n")
    assert f"its process is gone ({socket.gethostname()} pid {os.getpid()}" in text
    folder.lock.write_text(json.dumps(asdict(this_process())))
    assert reported(capsys, "status", "one").startswith("runs/one: running, step 7\n")


@pytest.mark.parametrize("verb", ["status", "watch", "cancel", "logs"])
def test_wrong_words(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not a run folder" in reported(capsys, verb, "nowhere", code=USER)
    assert "unexpected argument 'b'" in reported(capsys, verb, "a", "b", code=USER)
    assert "unknown flag '--jsn'" in reported(capsys, verb, "a", "--jsn", code=USER)
    assert reported(capsys, verb, "--help").startswith(f"usage: paceline {verb} RUN")


# --- watch ------------------------------------------------------------------------------------------------------------


def test_watch_until_the_fake_job_has_ended(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", {"status": "preempted", "step": 7, "reason": "SIGTERM"})
    for row in (PENDING, PENDING, RUNNING, COMPLETED.replace("COMPLETED", "CANCELLED")):
        fake.answer("squeue", row)
    fake.answer("scontrol", details("PENDING"))
    text = reported(capsys, "watch", "run", "--every-s", "0", code=PREEMPTED)
    heads = [line for line in text.splitlines() if line.startswith("run: ")]
    assert heads == ["run: queued, step 7", "run: starting, step 7", "run: preempted, step 7"]
    assert len(fake.calls("squeue")) == 4
    assert fake.calls("scancel") == []


def test_watch_ends_with_the_failure_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", {"status": "failed", "reason": "loss is nan"}, job_id="")
    folder.failure.write_text('{"exit_code": 5, "attempt": 1, "attempts": 1, "what": "loss is nan"}')
    assert "reason:   loss is nan" in reported(capsys, "watch", str(folder.path), code=5)
    assert "where:   flag --every-s" in reported(capsys, "watch", str(folder.path), "--every-s", "soon", code=USER)


def test_ctrl_c_does_not_cancel_the_fake_job(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", {"status": "running", "step": 7})
    fake.answer("squeue", RUNNING)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.status.time", SimpleNamespace(sleep=interrupt))
    assert "run continues (paceline cancel run stops it)" in reported(capsys, "watch", "run", code=INTERRUPTED)
    assert fake.calls("scancel") == []


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_of_a_fake_job(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", {"status": "running", "step": 7})
    fake.answer("squeue", RUNNING)
    assert "job 4711 is cancelled; it saves before it ends" in reported(capsys, "cancel", "run")
    assert fake.calls("scancel") == ["4711"]
    fake.answer("squeue", COMPLETED)
    assert "nothing to cancel" in reported(capsys, "cancel", "run")
    assert len(fake.calls("scancel")) == 1


def test_a_fake_job_cancelled_in_the_queue_is_cancelled_in_every_command(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm removes the job. The run has written nothing."""
    make_run(tmp_path / "runs" / "run")
    fake.answer("squeue", PENDING)
    assert "job 4711 is cancelled" in reported(capsys, "cancel", "run")
    fake.forget_job()
    assert json.loads(reported(capsys, "runs", "--json"))[0]["state"] == "cancelled"
    assert reported(capsys, "status", "run").startswith("runs/run: cancelled")


@pytest.mark.parametrize(("slurm", "state"), [("CANCELLED", "cancelled"), ("NODE_FAIL", "failed")])
def test_status_records_the_outcome_of_a_fake_job(
    slurm: str, state: str, fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example after scancel by hand. The job may also be requeued by hand."""
    make_run(tmp_path / "runs" / "run")
    for row, seen in ((COMPLETED.replace("COMPLETED", slurm), state), (PENDING, "submitted")):
        fake.answer("squeue", row)
        reported(capsys, "status", "run")
        assert json.loads(reported(capsys, "runs", "--json"))[0]["state"] == seen
    fake.answer("squeue", COMPLETED.replace("COMPLETED", slurm))
    reported(capsys, "status", "run")
    fake.forget_job()
    assert reported(capsys, "status", "run").startswith(f"runs/run: {state}")


def test_runs_asks_the_fake_once_for_jobs_that_have_written_nothing(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After scancel by hand, no other command has seen the end of the job."""

    def state() -> str:
        return str(json.loads(reported(capsys, "runs", "--json"))[0]["state"])

    make_run(tmp_path / "runs" / "run")
    fake.answer("squeue", "", err="Unable to contact slurm controller", code=1)
    assert state() == "submitted"
    fake.answer("squeue", "4711 4711")  # of the user's queue
    assert state() == "submitted"
    assert len(fake.calls("squeue")) == 2
    fake.answer("squeue", "")
    fake.answer("squeue", COMPLETED.replace("COMPLETED", "CANCELLED"))
    assert state() == "cancelled"
    assert state() == "cancelled"  # it is noted now
    assert len(fake.calls("squeue")) == 4


def test_cancel_while_fake_slurm_is_unreachable(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", {"status": "running", "step": 7})
    fake.answer("squeue", "", err="Unable to contact slurm controller", code=1)
    text = reported(capsys, "cancel", "run", code=70)
    assert "job 4711 cannot be queried" in text
    assert "scancel 4711" in text


def test_cancel_of_a_process_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", {"status": "running", "step": 7}, job_id="")
    code = (
        "import sys; from pathlib import Path; from paceline.runs import lock\n"
        "with lock.owned(Path(sys.argv[1])):\n"
        "    print('owned', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"owned\n"
        assert f"pid {owner.pid}" in reported(capsys, "cancel", str(folder.path))
        assert owner.wait(timeout=30) == -signal.SIGTERM
    # Only the lock file was left: the process has ended, and the message says so.
    assert "is not running (lost); nothing to cancel" in reported(capsys, "cancel", str(folder.path))


def test_cancel_of_a_process_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", {"status": "running", "step": 7}, job_id="")
    folder.lock.write_text(json.dumps({**asdict(this_process()), "host": "elsewhere", "pid": 12}))
    text = reported(capsys, "cancel", str(folder.path), code=USER)
    assert "another machine" in text
    assert "ssh elsewhere kill -TERM 12" in text


# --- logs -------------------------------------------------------------------------------------------------------------


def test_logs_of_ranks(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = make_run(tmp_path / "run", {"status": "finished", "step": 7}, job_id="")

    def logs(*flags: str) -> bytes:
        code = main(["logs", str(folder.path), *flags])
        captured = capfdbinary.readouterr()
        assert code == (USER if captured.err else 0)
        return captured.out + captured.err

    assert b"there is no log yet" in logs()
    (folder.logs / "slurm-4711.log").write_bytes(b"srun: error\n")
    assert logs() == b"srun: error\n", "the log has no more lines"
    for rank in (0, 1, 10):
        folder.log_of(rank).write_bytes(b"".join(b"rank %d line %d \xff\n" % (rank, n) for n in range(3)))
    shown = folder.log_of(0).read_bytes().replace(b"\xff", b"\\xff")
    assert logs() == shown, "bytes that are not text are escaped"
    assert logs("--rank", "10", "--lines", "1") == b"rank 10 line 2 \\xff\n"
    assert logs("--rank", "1", "--lines", "0") == b""
    assert logs("--rank=1", "--lines=99") == shown.replace(b"rank 0", b"rank 1")
    every = logs("--rank", "all", "--lines", "1")
    assert every.split(b"\n")[::2][:3] == [b"==> rank-0.log <==", b"==> rank-1.log <==", b"==> rank-10.log <=="]
    assert logs("--job") == b"srun: error\n"
    assert b"no log of rank 5" in logs("--rank", "5")
    assert b"where:   flag --rank" in logs("--rank", "one")
    assert b"one log or the other" in logs("--job", "--rank", "0")
    assert b"one log can be followed" in logs("--rank", "all", "--follow")
    assert logs("--follow", "--lines", "2") == b"rank 0 line 1 \\xff\nrank 0 line 2 \\xff\n", (
        "the run has ended: no wait"
    )


@pytest.mark.parametrize("flags", [(), ("--job",), ("--follow",)], ids=" ".join)
@pytest.mark.parametrize("has_empty_log", [True, False])
def test_logs_of_a_fake_job_without_output_name_the_log(
    has_empty_log: bool,
    flags: tuple[str, ...],
    fake: FakeSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slurm creates the log of a job when it starts. The first line comes seconds later."""
    folder = make_run(tmp_path / "run")
    if has_empty_log:
        (folder.logs / "slurm-4711.log").touch()
    fake.answer("squeue", RUNNING)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.logs.time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    has_place = has_empty_log or "--follow" in flags
    assert main(["logs", "run", *flags]) == (0 if has_place else USER)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the run is starting, job 4711: running on n[1-2]" in shown.err


def test_long_logs_are_read_from_their_end(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = make_run(tmp_path / "run", {"status": "finished", "step": 7}, job_id="")
    folder.log_of(0).write_bytes(b"".join(b"line %d\n" % number for number in range(50_000)))
    assert main(["logs", str(folder.path), "--lines", "20000"]) == 0
    assert capfdbinary.readouterr().out.split(b"\n")[0] == b"line 30000"


def test_logs_are_followed_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The log appears, grows, and the run ends, each during a pause of the follower."""
    folder = make_run(tmp_path / "run", {"status": "running", "step": 0}, job_id="")
    folder.lock.write_text(json.dumps(asdict(this_process())))

    def grow() -> None:
        folder.log_of(0).write_bytes(b"one\n")

    def grow_on() -> None:
        with folder.log_of(0).open("ab") as file:
            file.write(b"two\nthr")

    def end() -> None:
        with folder.log_of(0).open("ab") as file:
            file.write(b"ee\n")
        folder.write_status("finished", step=3)

    happens = [grow, grow_on, end]
    pauses = SimpleNamespace(sleep=lambda seconds: happens.pop(0)(), monotonic=time.monotonic)
    monkeypatch.setattr("paceline.cli.logs.time", pauses)
    assert main(["logs", str(folder.path), "--follow"]) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo\nthree\n"
    assert happens == []
