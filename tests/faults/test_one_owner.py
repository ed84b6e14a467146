"""Fault 20: two runs on one folder, a lock whose owner is dead, and a file system without locks."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from harness.cli import paceline
from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runs.machine import THIS_MACHINE
from paceline.runs.owner import Owner, this_process

ROUNDS, CONTENDERS = 20, 3
REFUSED_WITHIN_S = 1.0
_CONTEXT = multiprocessing.get_context("forkserver")


def refuse_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def folder_in(path: Path) -> RunFolder:
    folder = RunFolder(path / "run")
    folder.create()
    return folder


def dead_owner() -> Owner:
    """The owner record of a real process that has ended."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return replace(this_process(), pid=int(ended.stdout), process_start="1")


def write_owner(path: Path, owner: Owner) -> None:
    path.write_text(json.dumps(asdict(owner)) + "\n")


@pytest.fixture(params=["flock", "no flock"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that names the owner of the run folder, with and without flock. The missing flock is a fake."""
    folder = folder_in(tmp_path)
    if request.param == "flock":
        return folder.lock
    monkeypatch.setattr(fcntl, "flock", refuse_flock)
    return folder.path / "run.owner"


# --- Several starts at once -------------------------------------------------------------------------------------------


def contend(path: str, has_flock: bool, apart_s: float, number: int, barrier: Barrier, answers: Any) -> None:
    """In every round, try to own the folder at a random time. Hold it until all processes have tried."""
    if not has_flock:
        fcntl.flock = refuse_flock  # type: ignore[assignment]
    draw = random.Random(number)
    folder = RunFolder(Path(path))
    for _ in range(ROUNDS):
        barrier.wait()
        time.sleep(draw.uniform(0, apart_s))  # not a synchronisation: this is the random time
        started = time.monotonic()
        try:
            with folder.owned():
                answers.put((number, None, 0.0))
                barrier.wait()
        except UserError as refused:
            answers.put((number, str(refused.got), time.monotonic() - started))
            barrier.wait()
        barrier.wait()  # the winner has released it


@pytest.mark.parametrize("is_stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("has_flock", [True, False], ids=["flock", "fake: no flock"])
def test_exactly_one_of_several_simultaneous_starts_owns_the_folder(
    tmp_path: Path, has_flock: bool, is_stale: bool
) -> None:
    folder = folder_in(tmp_path)
    stale, apart_s = dead_owner(), 0.002 if is_stale else 0.1
    barrier, answers = _CONTEXT.Barrier(CONTENDERS + 1, timeout=30), _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(
            target=contend, args=(str(folder.path), has_flock, apart_s, number, barrier, answers), daemon=True
        )
        for number in range(CONTENDERS)
    ]
    for process in processes:
        process.start()
    pids = {process.pid for process in processes}
    for _ in range(ROUNDS):
        if is_stale:  # two processes might both win the takeover
            write_owner(folder.lock if has_flock else folder.path / "run.owner", stale)
        barrier.wait()
        barrier.wait()
        round_answers = [answers.get(timeout=10) for _ in range(CONTENDERS)]
        winners = [processes[number].pid for number, refusal, _ in round_answers if refusal is None]
        refusals = [(words, seconds) for _, words, seconds in round_answers if words is not None]
        assert len(winners) == 1
        assert len(refusals) == CONTENDERS - 1
        for words, seconds in refusals:
            assert f"{socket.gethostname()} pid {winners[0]} since 2" in words
            assert seconds < REFUSED_WITHIN_S
        assert winners[0] in pids
        barrier.wait()
    for process in processes:
        process.join(timeout=10)
        assert process.exitcode == 0
    answers.close()


def test_a_second_owner_is_refused_and_the_first_is_named(file: Path) -> None:
    folder = RunFolder(file.parent)
    with folder.owned():
        started = time.monotonic()
        with pytest.raises(UserError, match="another process is writing") as refused, folder.owned():
            pytest.fail("two owners")
        assert time.monotonic() - started < REFUSED_WITHIN_S
        assert refused.value.exit_code == 2
        assert f"{socket.gethostname()} pid {os.getpid()} since 2" in refused.value.screen()
        assert "--output-dir" in refused.value.screen()
    with folder.owned():  # the refused process has changed nothing
        pass


def test_a_clean_release_leaves_an_empty_lock_file(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    folder = RunFolder(file.parent)
    for _ in range(2):
        with folder.owned():
            assert json.loads(file.read_text())["pid"] == os.getpid()
        assert not file.exists() or file.read_text() == ""
    assert "ended without releasing" not in caplog.text


# --- Owners that died -------------------------------------------------------------------------------------------------

HOLDER = """
import errno, fcntl, os, signal, sys
from pathlib import Path
from paceline.runs.folder import RunFolder
if sys.argv[2] == "run.owner":
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = refuse
with RunFolder(Path(sys.argv[1])).owned():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_owner_is_taken_over_with_a_note(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    killed = subprocess.run([sys.executable, "-c", HOLDER, str(file.parent), file.name], check=False)
    assert killed.returncode == -9
    left = json.loads(file.read_text())  # the fault took effect: the file was not emptied or removed
    with RunFolder(file.parent).owned():
        assert json.loads(file.read_text())["pid"] == os.getpid()
    (note,) = [record.message for record in caplog.records if "ended without releasing" in record.message]
    assert note.startswith(f"note: the previous owner, {socket.gethostname()} pid {left['pid']} since {left['since']},")


def someone_else() -> Iterator[tuple[str, Owner, bool]]:
    me = this_process()
    assert me.process_start is not None, "this test needs /proc"
    yield "this very process", me, False
    yield "a number that was given to another process", replace(me, process_start="17"), True
    yield "before the machine was started again", replace(me, boot_id="another"), True
    yield "another machine", replace(me, host="elsewhere", pid=2**22 + 1), False


@pytest.mark.parametrize(("owner", "is_dead"), [pytest.param(o, dead, id=name) for name, o, dead in someone_else()])
def test_fake_no_flock_only_an_owner_that_is_surely_dead_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Owner, is_dead: bool
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_flock)
    folder = folder_in(tmp_path)
    file = folder.path / "run.owner"
    write_owner(file, owner)
    if is_dead:
        with folder.owned():
            assert json.loads(file.read_text()) == {
                **asdict(this_process()),
                "since": json.loads(file.read_text())["since"],
                "id": json.loads(file.read_text())["id"],
            }
        assert not file.exists()
        return
    with pytest.raises(UserError) as refused, folder.owned():
        pytest.fail("two owners")
    assert str(owner) in refused.value.screen()
    assert f"rm {file}" in refused.value.screen()
    assert json.loads(file.read_text()) == asdict(owner)


def test_fake_no_flock_an_empty_owner_file_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_flock)
    folder = folder_in(tmp_path)
    (folder.path / "run.owner").touch()
    started = time.monotonic()
    with pytest.raises(UserError, match="another process") as refused, folder.owned():
        pytest.fail("two owners")
    assert "an unknown owner" in refused.value.screen()
    assert time.monotonic() - started < REFUSED_WITHIN_S


def test_a_lock_on_a_deleted_lock_file_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The file is deleted between open and lock. Other processes open a new file, so the lock is useless.
    folder = folder_in(tmp_path)
    flock = fcntl.flock
    locked: list[Any] = []

    def delete_first(descriptor: int, how: int) -> None:
        if not locked:
            folder.lock.unlink()
        locked.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with folder.owned():
        assert len(locked) == 2
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()


def test_a_living_owner_is_detected_without_taking_the_lock(file: Path) -> None:
    folder = RunFolder(file.parent)
    folder.refuse_if_owned()
    write_owner(file, dead_owner())
    folder.refuse_if_owned()
    write_owner(file, replace(this_process(), pid=os.getppid(), process_start=THIS_MACHINE.process_start(os.getppid())))
    with pytest.raises(UserError, match="another process is writing"):
        folder.refuse_if_owned()


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.lock.mkdir()
    with pytest.raises(UserError, match="cannot be written"), folder.owned():
        pytest.fail("owned")


def test_a_second_command_is_refused_before_it_starts_a_process(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with folder.owned():
        answer = paceline("train", "shapes-cnn", "--processes=1", "--output-dir=run", cwd=tmp_path)
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.code == 2
    assert answer.err.startswith("error: another process is writing to this run folder")
    assert f"{socket.gethostname()} pid {os.getpid()} since 2" in answer.err
    # CPU time, because other tests may keep the machine busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < REFUSED_WITHIN_S
    assert not folder.config.exists()
