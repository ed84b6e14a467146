"""The error of a rank under torchrun is in torchrun's final summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.cli import Answer, command
from paceline.errors import UserError
from paceline.runtime.this_rank import is_summary_expected, leave_error_file

QUICK = ["synthetic-mlp", "--num-samples=640", "--global-batch-size=64", "--epochs=1", "--track", "--output-dir=run"]
TORCHS_OWN_WORDS = "To enable traceback see"


def torchrun(ranks: int, *arguments: str, cwd: Path, options: tuple[str, ...] = ()) -> Answer:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options)
    return command(*launch, "-m", "paceline", *arguments, cwd=cwd, OMP_NUM_THREADS="1")


def root_cause(answer: Answer) -> str:
    """The failure that torchrun's summary names as the first."""
    _, _, summary = answer.err.rpartition("Root Cause (first observed failure):")
    return summary


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_user_error_is_in_the_summary(ranks: int, tmp_path: Path) -> None:
    """The complete screen (what, where, got, allowed) is in the summary, and only there."""
    answer = torchrun(ranks, "train", *QUICK, "--base-lr=-1", cwd=tmp_path)
    assert answer.code == 1, answer
    summary = root_cause(answer)
    assert "exitcode  : 2" in summary, answer
    for line in (
        "error: base_lr is out of range",
        "where:   flag --base-lr",
        "got:     -1.0",
        "allowed: a number, greater than 0",
    ):
        assert line in summary, answer
    assert "error: base_lr" not in answer.err.partition("FAILED\n")[0], answer
    assert TORCHS_OWN_WORDS not in answer.err, answer


@pytest.mark.parametrize(
    ("ranks", "failing"),
    [(2, 1), pytest.param(1, 0, marks=pytest.mark.faults), pytest.param(2, 0, marks=pytest.mark.faults)],
)
def test_an_internal_error_is_the_root_cause(ranks: int, failing: int, tmp_path: Path) -> None:
    """The rank that raised is the root cause, with its message. The loss of a peer is a consequence."""
    answer = torchrun(ranks, "train", *QUICK, f"--inject=raise rank={failing} step=2", cwd=tmp_path)
    assert answer.code == 1, answer
    summary = root_cause(answer)
    assert f"rank      : {failing} (local_rank: {failing})" in summary, answer
    assert "exitcode  : 70" in summary, answer
    assert f"error: unexpected RuntimeError: injected: raise (rank {failing}, step 2)" in summary, answer
    assert TORCHS_OWN_WORDS not in answer.err, answer


@pytest.mark.faults
def test_the_error_of_the_primary_is_in_the_summary_of_every_rank(tmp_path: Path) -> None:
    """Only the primary looks for the checkpoint. The message is there for any rank that torchrun names first."""
    answer = torchrun(2, "train", *QUICK, "--resume=nowhere", cwd=tmp_path)
    assert answer.code == 1, answer
    for line in ("exitcode  : 2", "error: there is nothing to resume from", "where:   flag --resume"):
        assert answer.err.count(line) == 2, answer
    assert TORCHS_OWN_WORDS not in answer.err, answer


@pytest.mark.faults
def test_a_hang_is_in_the_summary(tmp_path: Path) -> None:
    """The guard process ends the rank with SIGKILL and reports phase, step and stacks."""
    flags = ["--hang-timeout-s=4", "--inject=hang rank=1 step=5"]
    answer = torchrun(2, "train", *QUICK, *flags, cwd=tmp_path)
    assert answer.code == 1, answer
    summary = root_cause(answer)
    assert "rank      : 1 (local_rank: 1)" in summary, answer
    assert "error: rank 1 made no progress for" in summary, answer
    assert "forward of step 5" in summary, answer
    assert "attempt-1-rank-1.txt" in summary, answer


@pytest.mark.faults
def test_a_restarted_attempt_prints_its_error(tmp_path: Path) -> None:
    """torchrun's summary describes only the last attempt."""
    answer = torchrun(1, "train", *QUICK, "--base-lr=-1", cwd=tmp_path, options=("--max-restarts=1",))
    assert answer.code == 1, answer
    above, _, summary = answer.err.partition("FAILED\n")
    assert above.count("error: base_lr is out of range") == 1, answer
    assert summary.count("error: base_lr is out of range") == 1, answer


@pytest.mark.faults
def test_a_rank_with_its_own_output_file_writes_its_error_there_too(tmp_path: Path) -> None:
    """With --redirects the message is in the rank's stderr.log and in the summary."""
    answer = torchrun(1, "train", *QUICK, "--base-lr=-1", cwd=tmp_path, options=("--redirects=3", "--log-dir=logs"))
    assert "error: base_lr is out of range" in root_cause(answer), answer
    (file,) = (tmp_path / "logs").rglob("stderr.log")
    assert "error: base_lr is out of range" in file.read_text()


def test_the_error_file_is_complete_and_has_the_fields_that_torchrun_reads(tmp_path: Path) -> None:
    """torch's own reader accepts the file. A consequence has a later time than its cause."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    found = []
    for rank in (0, 1):
        path = tmp_path / f"{rank}.json"
        screen = UserError("rank \u202e is\x1b[2J odd", got="x").screen()
        given = {"TORCHELASTIC_ERROR_FILE": str(path)}
        assert leave_error_file(screen, 2, is_consequence=rank == 0, environment=given)
        found.append(ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=str(path)))
        assert json.loads(path.read_text())["message"]["message"] == screen
    assert found[0].timestamp > found[1].timestamp
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_without_torchrun_or_a_folder_nothing_is_written(tmp_path: Path) -> None:
    """No variable, our own launcher, or a missing folder: the caller prints the error."""
    path = tmp_path / "gone" / "error.json"
    own = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "PACELINE_LAUNCHER": "paceline"}
    for environment in ({}, {"TORCHELASTIC_ERROR_FILE": ""}, {"TORCHELASTIC_ERROR_FILE": str(path)}, own):
        assert not leave_error_file("error", 2, environment=environment)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [("0", "0", True), ("0", "3", False), ("3", "3", True), ("", "", False), ("0", "x", False)],
)
def test_a_summary_is_expected_after_the_last_attempt(count: str, most: str, expected: bool, tmp_path: Path) -> None:
    """In doubt the answer is no: an error is printed twice rather than not at all."""
    given = {
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        "TORCHELASTIC_RESTART_COUNT": count,
        "TORCHELASTIC_MAX_RESTARTS": most,
    }
    assert is_summary_expected(given) is expected
