"""If a user's function ends the process, the run does not count as finished."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli import Answer, command, paceline
from harness.short_run import read_failures, read_json

CODE = """\
import os
import sys

from torch.nn import functional as F

calls = 0


def soft(logits, labels):
    leave_at_call_4(lambda: sys.exit(0))
    return F.cross_entropy(logits, labels)


def hard(logits, labels):
    leave_at_call_4(lambda: os._exit(0))
    return F.cross_entropy(logits, labels)


def generator(logits, labels):
    raise GeneratorExit


def interrupt(logits, labels):
    raise KeyboardInterrupt


def leave_at_call_4(leave):
    global calls
    calls += 1
    if calls == 4:
        leave()


def build(num_classes):
    sys.exit(0)
"""
# evaluate uses the source that is stored with the run, so a later change of the file has no effect.
EXITS_IF_ASKED = CODE.replace("== 4", "== int(os.environ.get('EXIT_AT_CALL', '400'))")
FLAGS = ["train", "synthetic-mlp", "--num-samples=2000", "--epochs=2", "--output-dir=run"]


def train(folder: Path, *flags: str) -> Answer:
    (folder / "own.py").write_text(CODE)
    return paceline(*FLAGS, *flags, cwd=folder)


@pytest.mark.parametrize("flag", ["--loss=own.py:soft", "--model-name=own.py:build"])
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_sys_exit_in_user_code_is_a_user_error(flag: str, processes: int, tmp_path: Path) -> None:
    """SystemExit(0) in a loss or a model function: exit code 2, the line that called it, and no result."""
    answer = train(tmp_path, flag, f"--processes={processes}")
    assert answer.code == 2, answer
    assert "own.py, line " in answer.err
    assert read_json(tmp_path / "run" / "status.json")["status"] == "failed"
    assert not (tmp_path / "run" / "results.json").exists()
    assert len(read_failures(tmp_path / "run")) == 1


@pytest.mark.parametrize("name", ["generator", "interrupt"])
def test_base_exceptions_in_user_code_are_a_user_error(name: str, tmp_path: Path) -> None:
    """GeneratorExit or KeyboardInterrupt in a loss, on 2 ranks: one screen with the line, exit code 2, no restart."""
    answer = train(tmp_path, f"--loss=own.py:{name}", "--processes=2")
    assert answer.code == 2, answer
    assert answer.err.count("own.py, line ") == 1
    assert "Traceback" not in answer.out + answer.err
    assert len(read_failures(tmp_path / "run")) == 1


@pytest.mark.faults
@pytest.mark.parametrize("processes", [1, 2])
def test_a_rank_that_exits_with_0_before_the_end_has_failed(processes: int, tmp_path: Path) -> None:
    """os._exit(0) leaves no report. The attempt has failed and is restarted, and the run does not end with 0."""
    answer = train(tmp_path, "--loss=own.py:hard", f"--processes={processes}", "--max-restarts=1")
    assert answer.code == 70, answer
    status = read_json(tmp_path / "run" / "status.json")
    assert status["status"] == "failed"
    failures = read_failures(tmp_path / "run")
    assert [failure["cause"] for failure in failures] == ["rank-exited", "rank-exited"]
    assert not (tmp_path / "run" / "results.json").exists()


@pytest.mark.faults
def test_sys_exit_in_user_code_under_torchrun(tmp_path: Path) -> None:
    """torchrun treats exit code 0 as finished, so the rank ends with 2."""
    (tmp_path / "own.py").write_text(CODE)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        "-m",
        "paceline",
    ]
    answer = command(*torchrun, *FLAGS, "--loss=own.py:soft", cwd=tmp_path)
    assert answer.code != 0, answer
    assert "exitcode  : 2" in answer.err, answer
    assert read_json(tmp_path / "run" / "status.json")["status"] == "failed"


@pytest.mark.faults
@pytest.mark.parametrize("processes", [1, 2])
def test_os_exit_in_user_code_under_torchrun(processes: int, tmp_path: Path) -> None:
    """os._exit(0) in every rank: torchrun only sees exit codes, so the ranks end with 2. The run has failed."""
    (tmp_path / "own.py").write_text(CODE)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "paceline"]
    answer = command(sys.executable, *torchrun, *FLAGS, "--loss=own.py:hard", cwd=tmp_path)
    assert answer.code != 0, answer
    assert "exitcode  : 2" in answer.err, answer
    assert "own.py, line " in answer.err, answer
    assert read_json(tmp_path / "run" / "status.json")["status"] == "failed"
    assert not (tmp_path / "run" / "results.json").exists()


def test_os_exit_in_a_rank_without_a_supervisor(tmp_path: Path) -> None:
    """One process per rank, as with srun: the process ends with exit code 2, and the status is failed."""
    (tmp_path / "own.py").write_text(CODE)
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    answer = paceline(*FLAGS, "--loss=own.py:hard", cwd=tmp_path, env=one)
    assert answer.code == 2, answer
    assert "own.py, line " in answer.err, answer
    status = read_json(tmp_path / "run" / "status.json")
    assert status["status"] == "failed"
    assert "os._exit" in status["reason"]


@pytest.mark.faults
def test_os_exit_in_user_code_of_other_commands(tmp_path: Path) -> None:
    """If a user's function ends `evaluate`, nothing was evaluated: exit code 2."""
    (tmp_path / "own.py").write_text(EXITS_IF_ASKED)
    answer = paceline(*FLAGS, "--epochs=1", "--processes=1", "--loss=own.py:hard", cwd=tmp_path)
    assert answer.code == 0, answer
    answer = paceline("evaluate", "run", cwd=tmp_path, EXIT_AT_CALL="1")
    assert answer.code == 2, answer


@pytest.mark.faults
def test_sys_exit_in_user_code_of_other_commands(tmp_path: Path) -> None:
    """`evaluate` calls the same functions: exit code 2."""
    (tmp_path / "own.py").write_text(EXITS_IF_ASKED)
    flags = [*FLAGS, "--epochs=1", "--processes=1", "--loss=own.py:soft"]
    answer = paceline(*flags, cwd=tmp_path)
    assert answer.code == 0, answer
    answer = paceline("evaluate", "run", cwd=tmp_path, EXIT_AT_CALL="1")
    assert answer.code == 2, answer
