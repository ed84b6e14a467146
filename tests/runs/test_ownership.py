"""Ownership of a run: an owner and its ranks, a new owner, other machines, other clocks, processes that end late."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.ranks import make_world
from paceline.checkpoints.format import step_folders
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention
from paceline.errors import EXIT_OWNER_LOST, OwnerLost, UserError
from paceline.metrics.recorder import Recorder
from paceline.runs import lock
from paceline.runs import owner as owner_module
from paceline.runs.folder import RunFolder
from paceline.runs.machine import Machine
from paceline.runs.members import MEMBERS, SILENT_S, Member, drop_dead_members, read_members
from paceline.runs.owner import Owner, new_owner, this_process

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


class FakeTime(Machine):
    """This machine with a clock that only sleep advances, also for the file system."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.on_sleep: Callable[[], None] = lambda: None

    def now_s(self) -> float:
        return self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += max(seconds, 0.25)  # coarse steps are enough: nothing else happens meanwhile
        self.on_sleep()

    def file_clock_ns(self, folder: Path) -> int:
        return super().file_clock_ns(folder) + int(self.passed_s * 1e9)


class OtherHost(FakeTime):
    """Another computer that sees the same folder but has separate locks."""

    def __init__(self, host: str = "elsewhere") -> None:
        super().__init__()
        self._host = host

    @property
    def host(self) -> str:
        return self._host

    @property
    def boot_id(self) -> str | None:
        return f"boot of {self._host}"

    def flock(self, descriptor: int, operation: int) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def write_record(folder: RunFolder, member: Owner, age_s: float = 0.0) -> Path:
    (folder.path / MEMBERS).mkdir(exist_ok=True)
    path = folder.path / MEMBERS / f"{member.host}-{member.pid}.json"
    path.write_text(member.to_json())
    set_age(path, age_s)
    return path


def set_age(path: Path, age_s: float) -> None:
    now_ns = path.stat().st_mtime_ns
    os.utime(path, ns=(now_ns, now_ns - int(age_s * 1e9)))


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()


MEMBER = """
import sys, time
from pathlib import Path
from paceline.runs.members import Member
member = Member(Path(sys.argv[1]), "before", is_owner=sys.argv[2] == "owner")
member.join()
print("up", flush=True)
time.sleep(600)
"""


@contextmanager
def living_member(folder: RunFolder, role: str = "rank") -> Iterator[subprocess.Popen[str]]:
    """A process that has joined the run, like ranks and owners."""
    command = [sys.executable, "-c", MEMBER, str(folder.path), role]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def named(process: subprocess.Popen[str], owner_id: str = "before") -> Owner:
    return replace(this_process(), pid=process.pid, process_start=Machine().process_start(process.pid), id=owner_id)


# --- A rank whose owner lost the run ----------------------------------------------------------------------------------


def save(manager: CheckpointManager, step: int) -> None:
    payload = {"model": {"w": torch.full((2,), float(step))}}
    manager.save(payload, {"step": step, "keep": False, "validation": None}, {"step": step}, is_best=False)
    manager.wait()


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_rank_whose_owner_lost_the_lock_changes_nothing(folder: RunFolder) -> None:
    """No checkpoint, pointer, status, metrics or record of the new owner changes. The error has its own class."""
    with lock.owned(folder.lock) as owner_id:
        old = RunFolder(folder.path, Member(folder.path, owner_id))
        old.require_owner()
        settings = {"is_sharded": False, "retention": Retention(keep_last=1), "is_async": False}
        manager = CheckpointManager(
            folder.checkpoints,
            make_world(0, 1),
            require_owner=old.require_owner,
            **settings,  # type: ignore[arg-type]
        )
        recorder = Recorder(old, resume_step=0)
        save(manager, 5)
    with folder.owned():
        new = CheckpointManager(folder.checkpoints, make_world(0, 1), **settings)  # type: ignore[arg-type]
        save(new, 8)
        folder.write_status("running", step=8)
        before = contents(folder.path)
        for write in (
            lambda: save(manager, 6),
            lambda: old.write_status("preempted", step=6),
            recorder._write_csv,
            lambda: Recorder(old, resume_step=0),
            old.update_mirror_status,
        ):
            with pytest.raises(OwnerLost) as lost:
                write()
            assert lost.value.exit_code == EXIT_OWNER_LOST
        assert contents(folder.path) == before
        recorder.close()


def test_a_rank_of_an_earlier_owner_does_not_write_after_a_release(folder: RunFolder) -> None:
    """After another owner has come and gone, ranks of the first owner still write nothing."""
    with lock.owned(folder.lock) as owner_id:
        member = Member(folder.path, owner_id)
        member.require()
    with folder.owned():
        pass
    with pytest.raises(OwnerLost):
        member.require()


def test_a_deleted_lock_file_is_no_loss_of_the_run(folder: RunFolder) -> None:
    """A run continues if its lock file is deleted. It ends if another owner creates a new one."""
    with folder.owned() as member:
        folder.lock.unlink()
        member.require()
        with RunFolder(folder.path).owned(), pytest.raises(OwnerLost):
            member.require()


def test_an_unreadable_lock_file_is_no_loss_of_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error is raised as an error. It is no evidence about the owner."""
    with folder.owned() as member:

        def fail(*_: object) -> bytes:
            raise TimeoutError(110, "Connection timed out")

        with monkeypatch.context() as outage:
            outage.setattr(owner_module, "read_small", fail)
            with pytest.raises(TimeoutError):
                member.require()
            member.beat()
        member.require()


def test_the_heartbeat_reports_the_loss(folder: RunFolder) -> None:
    """A waiting member learns about the new owner at its next heartbeat."""
    with lock.owned(folder.lock) as owner_id:
        member = Member(folder.path, owner_id)
        member.join(beats=False)
        member.beat()
    folder.lock.write_text(new_owner(OtherHost()).to_json())
    with pytest.raises(OwnerLost) as lost:
        member.beat()
    assert str(lost.value.got).startswith("elsewhere pid ")


def test_a_rank_that_starts_after_the_takeover_does_not_join(folder: RunFolder) -> None:
    """A rank has the id of its supervisor, not the id in the folder."""
    with folder.owned(), pytest.raises(OwnerLost):
        Member(folder.path, "id of a killed supervisor").join()
    assert not (folder.path / MEMBERS).exists()


def test_an_owner_that_lost_the_run_keeps_the_new_owners_record(folder: RunFolder) -> None:
    """A release empties only its own lock file."""
    with folder.owned():
        words = new_owner(OtherHost()).to_json()
        folder.lock.write_text(words)
    assert folder.lock.read_text() == words


# --- Ranks of the previous owner --------------------------------------------------------------------------------------


def test_ranks_of_a_dead_owner_are_ended_before_the_new_one_begins(folder: RunFolder) -> None:
    """They get time to save. Then they are killed, and their records are removed."""
    machine = FakeTime()
    with living_member(folder) as rank:
        assert len(read_members(folder.path)) == 1
        with lock.owned(folder.lock, machine):
            # Its files are closed now. The kernel may need a moment until the process can be reaped.
            assert rank.wait(60) == -9
            assert read_members(folder.path) == {}
    assert machine.passed_s >= 10


def test_ranks_that_save_and_end_by_themselves_are_not_killed(folder: RunFolder) -> None:
    """Until they end, the lock file has the id of their owner, so that their last save counts."""
    machine = FakeTime()
    dead = replace(this_process(), pid=2**22 + 1, process_start="1", id="before")
    folder.lock.write_text(dead.to_json())
    with living_member(folder) as rank:
        member = Member(folder.path, "before")
        seen: list[float] = []

        def leave() -> None:
            member.require()
            seen.append(machine.passed_s)
            if len(seen) == 4:
                rank.terminate()
                rank.wait()

        machine.on_sleep = leave
        with lock.owned(folder.lock, machine):
            assert rank.returncode == -15
    assert len(seen) == 4


def test_a_reused_process_id_is_not_killed(folder: RunFolder) -> None:
    """A record names a process by its id and its start time. A later process with the same id is not killed."""
    with sleeper() as other:
        record = write_record(folder, replace(named(other), process_start="17"))
        with folder.owned():
            assert other.poll() is None
            assert not record.exists()


def test_a_process_without_a_start_time_is_not_killed(folder: RunFolder) -> None:
    """Without a start time the process id is no proof. The start is refused."""
    with living_member(folder) as other:
        (record,) = read_members(folder.path)
        record.write_text(replace(named(other), process_start=None).to_json())
        with pytest.raises(UserError, match="previous owner") as refused, lock.owned(folder.lock, FakeTime()):
            pytest.fail("owned")
        assert other.poll() is None
        assert refused.value.exit_code == 2


def test_a_silent_rank_on_another_machine_is_ignored_after_a_wait(folder: RunFolder) -> None:
    """It counts as dead if its record has not changed for a while."""
    record = write_record(folder, this_process(OtherHost(), "before"))
    machine = FakeTime()
    with lock.owned(folder.lock, machine):
        assert not record.exists()
    assert SILENT_S <= machine.passed_s <= 1.5 * SILENT_S


def test_a_living_rank_on_another_machine_refuses_a_new_owner(folder: RunFolder) -> None:
    """Its record keeps changing. The start is refused after a limited time, and the rank is named."""
    record = write_record(folder, this_process(OtherHost("node7"), "before"))
    machine = FakeTime()
    machine.on_sleep = lambda: os.utime(record, ns=(0, machine.file_clock_ns(folder.path)))
    with pytest.raises(UserError, match="previous owner") as refused, lock.owned(folder.lock, machine):
        pytest.fail("owned")
    assert str(refused.value.got).startswith("node7 pid")
    assert machine.passed_s <= 3 * SILENT_S
    assert record.exists()


def test_a_rank_on_another_machine_ends_when_it_sees_the_new_owner(folder: RunFolder) -> None:
    """The lock file has the new id while the new owner waits. The rank reads it there and ends."""
    other = OtherHost()
    folder.lock.write_text(replace(this_process(), pid=2**22 + 1, process_start="1", id="before").to_json())
    member = Member(folder.path, "before", machine=other)
    member.join(beats=False)
    machine = FakeTime()

    def beat() -> None:
        with pytest.raises(OwnerLost):
            member.beat()
        member.leave()
        machine.on_sleep = lambda: None

    machine.on_sleep = beat
    with lock.owned(folder.lock, machine):
        assert read_members(folder.path) == {}
    assert machine.passed_s < 1


def test_records_of_dead_processes_of_this_machine_are_removed(folder: RunFolder) -> None:
    """Killed ranks leave records. Each node removes its own, so that no other node waits for them."""
    dead = write_record(folder, replace(this_process(), pid=2**22 + 1, process_start="1", id="before"))
    far = write_record(folder, this_process(OtherHost(), "before"))
    drop_dead_members(folder.path)
    assert (dead.exists(), far.exists()) == (False, True)


def test_a_forked_child_does_not_keep_the_lock(folder: RunFolder) -> None:
    """A child that outlives its parent must not hold the run folder."""
    program = (
        "import os, sys, time; from pathlib import Path; from paceline.runs.folder import RunFolder\n"
        f"with RunFolder(Path({str(folder.path)!r})).owned():\n"
        "    if os.fork() == 0:\n"
        "        os.close(1); time.sleep(600)\n"
        "    print('forked', flush=True); os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.communicate()[0] == "forked\n"
        with folder.owned():
            pass
    finally:
        os.killpg(process.pid, 9)


# --- Records without proof, and owners without a lock file ------------------------------------------------------------


def test_a_forged_record_of_a_process_is_no_proof(folder: RunFolder) -> None:
    """A record that another user wrote ends no process and delays no start."""
    machine = FakeTime()
    with sleeper() as other:
        record = write_record(folder, named(other))
        with lock.owned(folder.lock, machine):
            assert other.poll() is None
            assert not record.exists()
    assert machine.passed_s == 0


@pytest.mark.parametrize("copy", ["copied", "hard links"])
@pytest.mark.parametrize("role", ["rank", "owner"])
def test_a_copy_of_a_live_run_ends_no_process_of_the_original(
    folder: RunFolder, tmp_path: Path, copy: str, role: str
) -> None:
    """The records in the copy belong to another folder."""
    machine = FakeTime()
    with living_member(folder, role) as member:
        link = os.link if copy == "hard links" else shutil.copy2
        shutil.copytree(folder.path, tmp_path / "copy", copy_function=link)
        with lock.owned(tmp_path / "copy" / "run.lock", machine):
            assert member.poll() is None
            assert read_members(tmp_path / "copy") == {}
        assert len(read_members(folder.path)) == 1
    assert machine.passed_s == 0


def test_a_process_that_only_reads_a_record_is_no_member(folder: RunFolder) -> None:
    """Any user can make a process read a file. Only a record that is open for writing is a proof."""
    record = write_record(folder, this_process())
    program = f"import time; file = open({str(record)!r}); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "up\n"
            record.write_text(named(reader).to_json())
            with lock.owned(folder.lock, FakeTime()):
                assert reader.poll() is None
        finally:
            reader.kill()


def test_fake_no_proc_a_living_process_without_a_proof_is_a_refusal(folder: RunFolder) -> None:
    """If the system does not show the open files of a process, it gets no signal, and the start is refused."""

    class Silent(FakeTime):
        def has_open(self, pid: int, path: Path) -> bool | None:
            return None

    with living_member(folder) as member:
        with pytest.raises(UserError, match="previous owner"), lock.owned(folder.lock, Silent()):
            pytest.fail("owned")
        assert member.poll() is None


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_living_owner_is_not_taken_over_after_its_lock_file_was_deleted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, has_flock: bool
) -> None:
    """The start is refused as with a lock, and creates no lock file that the owner would see as a loss."""
    if not has_flock:

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
    with living_member(folder, "owner") as owner:
        for hold in (folder.owned, lambda: lock.owned(folder.lock)):
            with pytest.raises(UserError, match="another process is writing") as refused, hold():
                pytest.fail("two owners")
            assert f" pid {owner.pid} since" in str(refused.value.got)
        with pytest.raises(UserError, match="another process is writing"):
            folder.refuse_if_owned()
        assert owner.poll() is None
        assert not folder.lock.exists()
    with folder.owned():
        pass


@pytest.mark.parametrize("kind", ["link to a folder", "file", "link to nothing"])
def test_records_are_written_only_in_a_real_folder(folder: RunFolder, tmp_path: Path, kind: str) -> None:
    """Behind a link, nothing is written or removed: exit code 2."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.json").write_text("{}")
    (other / "b.tmp").write_text("mine")
    members = folder.path / MEMBERS
    if kind == "file":
        members.write_text("")
    else:
        members.symlink_to(other if kind == "link to a folder" else tmp_path / "nothing")
    before = contents(tmp_path)
    for hold in (folder.owned, lambda: lock.owned(folder.lock, FakeTime())):
        with pytest.raises(UserError) as refused, hold():
            pytest.fail("owned")
        assert (refused.value.exit_code, refused.value.where) == (2, str(members))
    with pytest.raises(UserError):
        folder.refuse_if_owned()
    with pytest.raises(UserError):
        Member(folder.path, "before").join(beats=False)
    drop_dead_members(folder.path)
    assert contents(tmp_path) == before


# --- Locks that other hosts do not see --------------------------------------------------------------------------------


def test_fake_host_local_locks_a_recent_status_refuses_a_second_host(folder: RunFolder) -> None:
    """The lock is free here but names another host, and the run wrote recently: refused, the record unchanged."""
    words = this_process(OtherHost("node7")).to_json()
    folder.lock.write_text(words)
    folder.write_status("running", step=3)
    for hold in (folder.owned, lambda: lock.owned(folder.lock)):
        with pytest.raises(UserError, match="another process is writing") as refused, hold():
            pytest.fail("two owners")
        assert str(refused.value.got).startswith("node7 pid")
    with pytest.raises(UserError, match="another process is writing"):
        folder.refuse_if_owned()
    assert folder.lock.read_text() == words


def test_fake_host_local_locks_an_old_status_is_taken_over(folder: RunFolder) -> None:
    """An owner on another host without a sign of life for long is dead."""
    folder.lock.write_text(this_process(OtherHost()).to_json())
    folder.write_status("running", step=3)
    set_age(folder.status, 3600)
    machine = FakeTime()
    with lock.owned(folder.lock, machine) as owner_id:
        assert json.loads(folder.lock.read_text())["id"] == owner_id
    assert machine.passed_s == 0


@pytest.mark.parametrize("ahead_s", [-120.0, 120.0], ids=["behind", "ahead"])
def test_fake_host_local_locks_do_not_depend_on_equal_clocks(folder: RunFolder, ahead_s: float) -> None:
    """The time of a status is from another clock and proves nothing. A change during the wait does."""
    folder.lock.write_text(this_process(OtherHost()).to_json())
    folder.write_status("running", step=3)
    set_age(folder.status, -ahead_s)
    machine = FakeTime()
    machine.on_sleep = lambda: os.utime(folder.status, ns=(0, folder.status.stat().st_mtime_ns + 10**9))
    with pytest.raises(UserError, match="another process is writing"), lock.owned(folder.lock, machine):
        pytest.fail("two owners")
    machine.on_sleep = lambda: None
    with lock.owned(folder.lock, machine):
        pass


def test_fake_host_local_locks_two_hosts_never_own_at_once(folder: RunFolder) -> None:
    """The owner's heartbeat refuses the other host, before the run has a status."""
    other = OtherHost()
    with folder.owned() as member:
        with pytest.raises(UserError, match="another process"), lock.owned(folder.lock, other):
            pytest.fail("two owners")
        member.require()


def test_containers_with_the_same_host_name_cannot_see_each_others_processes(folder: RunFolder) -> None:
    """The same host name and process id in another namespace: it is unknown whether the process is alive."""
    owner = replace(this_process(), pid=2**22 + 1, pid_namespace="pid:[17]")
    assert (owner.is_provably_dead, owner.is_provably_alive) == (False, False)
    folder.lock.write_text(owner.to_json())
    folder.write_status("running", step=3)
    with pytest.raises(UserError, match="another process"), folder.owned():
        pytest.fail("two owners")


# --- Rewind -----------------------------------------------------------------------------------------------------------


def test_only_a_rewind_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    """A save without a rewind does not. The first commit after a rewind deletes them."""
    manager = CheckpointManager(
        tmp_path, make_world(0, 1), is_sharded=False, retention=Retention(keep_last=9), is_async=False
    )

    def steps() -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in step_folders(tmp_path)]

    for step in (2, 4, 6, 8):
        save(manager, step)
    save(manager, 5)  # no rewind: nothing is set aside
    assert steps() == [8, 6, 5, 4, 2]
    manager.rewind_to(4)
    assert steps() == [4, 2]
    assert len(list(tmp_path.glob("superseded-step-*"))) == 3
    save(manager, 7)
    assert not list(tmp_path.glob("superseded-step-*"))
    assert steps() == [7, 4, 2]
    save(manager, 9)
    assert steps() == [9, 7, 4, 2]
