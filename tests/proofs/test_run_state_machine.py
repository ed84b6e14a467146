"""Two supervisors with ranks, a store and a disk that fails for a while, in any order that hypothesis generates.

Computers and processes are simulated (harness/simulated_machines.py). Data and model are replaced. Ownership,
checkpoints, metrics, mirror and fetch are real. The invariants: one writer; steps never go backwards without a rewind;
every checkpoint that was reported as saved can be loaded. PACELINE_STATE_MACHINE_EXAMPLES=2000 runs longer.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.failing_disk import Killed, failing, working
from harness.recorded_disk import read_tree
from harness.run_lives import RunLife, check_rows, check_whole
from harness.simulated_machines import Computers, SimulatedMachine
from paceline.checkpoints import fetch as fetch_module
from paceline.checkpoints import manager as manager_module
from paceline.checkpoints import store
from paceline.checkpoints.mirror import StoreMirror
from paceline.checkpoints.named import list_checkpoints
from paceline.checkpoints.uploader import CheckpointUploader, TakenOver
from paceline.errors import OwnerLost, PacelineError, UserError
from paceline.runs import lock, patience, stores
from paceline.runs.folder import RunFolder
from paceline.runs.members import SILENT_S, Member
from paceline.runs.owner import LOCK
from paceline.runs.stores import MirrorNote

EXAMPLES = int(os.environ.get("PACELINE_STATE_MACHINE_EXAMPLES", "40"))
TIMEOUT_S = max(300, 8 * EXAMPLES)  # seconds of CPU time, on machines that may be shared
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S)]

URL = "memory://state-machine"
HOSTS = ("first", "second")
TWO = store.Retention(keep_last=2, keep_best=1)
ERRORS = (errno.EIO, errno.ETIMEDOUT, errno.ENOSPC, errno.EACCES)


@dataclass
class Rank:
    machine: SimulatedMachine
    member: Member
    life: RunLife
    supervisor: SimulatedMachine

    @property
    def is_orphan(self) -> bool:
        return self.machine.is_alive and not self.supervisor.is_alive

    @property
    def may_write(self) -> bool:
        try:
            with working():
                self.member.require()
        except OwnerLost:
            return False
        return True


@dataclass
class Supervisor:
    machine: SimulatedMachine
    held: Any  # the lock
    member: Member
    uploader: CheckpointUploader
    ranks: list[Rank] = field(default_factory=list)


def uploader_of(folder: RunFolder, note: MirrorNote) -> CheckpointUploader:
    return CheckpointUploader(folder, StoreMirror(folder, note))


class TwoSupervisors(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.computers = Computers()
        self.computers.while_waiting = self.let_others_run
        shared = Path("/dev/shm")
        self.disk = Path(tempfile.mkdtemp(prefix="paceline-", dir=shared if shared.is_dir() else None))
        self.run = self.disk / "run"
        self.supervisors: list[Supervisor] = []
        self.dead: list[Any] = []  # objects of killed processes: garbage collection would run their cleanup
        self.newest = 0  # reported as saved, and not discarded by a rewind
        self.attempted = 0  # a save that failed or was killed may exist
        self.arrived = 0  # the newest in the store after a complete mirror round
        self.is_store_down = self.is_disk_failing = False
        self.saving: Rank | None = None
        MemoryFileSystem.store.clear()
        self.patches = ExitStack()
        for patch in (
            mock.patch.object(store, "RETRY_PAUSE_S", 0.0),
            mock.patch.dict(os.environ, {patience.PATIENCE: "0"}),
            mock.patch.object(stores, "_PAUSES_S", ()),
            mock.patch.object(stores, "_request", self.ask_store(stores._request)),
            mock.patch("builtins.print"),
        ):
            self.patches.enter_context(patch)

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            for life in [rank.life for rank in self.ranks] + [
                thing for thing in self.dead if isinstance(thing, RunLife)
            ]:
                with suppress(Exception):
                    life.close()
            for held in [supervisor.held for supervisor in self.supervisors] + self.dead:
                with suppress(Exception):
                    held.__exit__(None, None, None)
            self.patches.close()
            shutil.rmtree(self.disk)
            MemoryFileSystem.store.clear()

    # --- Parts of the rules

    def ask_store(self, real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def ask(question: Any) -> Any:
            if self.is_store_down:
                raise stores.StoreError("the store is away")
            return real(question)

        return ask

    @property
    def ranks(self) -> list[Rank]:
        return [rank for supervisor in self.supervisors for rank in supervisor.ranks]

    @property
    def living_ranks(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.machine.is_alive]

    @property
    def orphans(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.is_orphan]

    @property
    def owner(self) -> Supervisor | None:
        """The supervisor whose id is in the folder."""
        living = [supervisor for supervisor in self.supervisors if supervisor.machine.is_alive]
        return next((supervisor for supervisor in living if self.owns(supervisor)), None)

    def owns(self, supervisor: Supervisor) -> bool:
        with suppress(OwnerLost), working():
            supervisor.member.require()
            return True
        return False

    def let_others_run(self) -> None:
        """While a new owner waits, ranks write heartbeats, and orphans save and end."""
        for rank in self.living_ranks:
            self.show_life(rank)
            if rank.is_orphan and rank is not self.saving:
                self.save(rank)
                self.leave(rank)

    def show_life(self, rank: Rank) -> None:
        try:
            rank.member.beat()
        except OwnerLost:
            self.leave(rank)
        else:
            self.computers.changed_s[self.run / "status.json"] = self.computers.clock_s

    def leave(self, rank: Rank) -> None:
        rank.member.leave()
        self.end(rank)

    def end(self, rank: Rank) -> None:
        self.computers.end_process(rank.machine)
        self.dead.append(rank.life)

    def save(self, rank: Rank, *, is_best: bool = False) -> None:
        """Train a step and save. The save is reported or fails. A rank without its owner changes nothing."""
        may_write = rank.may_write
        with working():
            before = None if may_write else read_tree(self.run / "checkpoints")
        self.saving = rank
        try:
            rank.life.train(1)
            self.attempted = max(self.attempted, rank.life.step) if may_write else self.attempted
            report = rank.life.save(is_best=is_best)
        except OwnerLost:
            assert not may_write
            self.leave(rank)
        except (OSError, PacelineError):
            # A rank that lost its owner cannot detect that while the disk fails. It still changes nothing.
            assert may_write or self.is_disk_failing
            # Like a rank whose save fails three times, or whose folder is lost.
            self.computers.end_process(rank.machine)
            self.end(rank)
        else:
            assert may_write
            assert report["step"] > self.newest
            self.newest = report["step"]
        finally:
            self.saving = None
        with working():
            assert before is None or read_tree(self.run / "checkpoints") == before

    def start(self, host: str, goes_back_to: int | None = None, *, is_second_try: bool = False) -> None:
        """Start a supervisor with one rank, like `paceline train --resume`. It may be refused."""
        machine = self.computers.start_process(host)
        held = lock.owned(self.run / LOCK, machine)
        self.dead.append(held)
        try:
            RunFolder(self.run).create()
            owner_id = held.__enter__()
        except (UserError, OSError):
            self.computers.end_process(machine)
            is_taken = any(s.machine.is_alive for s in self.supervisors) or self.living_ranks
            if not is_taken and not self.is_disk_failing:
                # Processes that died on another host look alive for a while. After that the folder is free.
                assert not is_second_try
                self.computers.clock_s += 2 * SILENT_S
                self.start(host, goes_back_to, is_second_try=True)
            return
        member = Member(self.run, owner_id, machine=machine)
        folder = RunFolder(self.run, member)
        supervisor = Supervisor(machine, held, member, uploader_of(folder, MirrorNote(URL)))
        self.supervisors.append(supervisor)
        try:
            member.join(beats=False)
            with suppress(stores.StoreError):
                there = stores.open_store(URL, "here")
                note = fetch_module._write_token(there, folder, MirrorNote(URL, keep_last=2))
                supervisor.uploader = uploader_of(folder, note)
            self.start_rank(supervisor, goes_back_to)
        except (OSError, PacelineError):  # the disk fails: nothing is lost, and the start reports it
            self.kill(supervisor)

    def start_rank(self, supervisor: Supervisor, goes_back_to: int | None) -> None:
        machine = self.computers.start_process(supervisor.machine.host)
        member = Member(self.run, supervisor.member.id, machine=machine)
        try:
            member.join(beats=False)
            life = RunLife(self.run, retention=TWO, member=member, goes_back_to=goes_back_to)
        except BaseException:
            self.computers.end_process(machine)
            raise
        supervisor.ranks.append(Rank(machine, member, life, supervisor.machine))
        if goes_back_to is not None:
            self.newest = self.attempted = goes_back_to
            self.arrived = min(self.arrived, goes_back_to)
        assert self.newest <= life.step <= max(self.attempted, self.newest)
        self.newest = life.step  # from here on, it is visible to users
        check_rows(RunFolder(self.run), life.step)

    def kill(self, supervisor: Supervisor) -> None:
        self.computers.end_process(supervisor.machine)

    @contextmanager
    def trouble(self, number: int | None, after: int) -> Iterator[None]:
        self.is_disk_failing = True
        with failing(number, after=after, operations=3):
            yield
        self.is_disk_failing = False

    # --- Rules: starts and ends

    @rule(host=st.sampled_from(HOSTS))
    def start_supervisor(self, host: str) -> None:
        self.start(host)

    @rule(host=st.sampled_from(HOSTS), number=st.sampled_from(ERRORS), after=st.integers(0, 60))
    def start_supervisor_while_the_disk_fails(self, host: str, number: int, after: int) -> None:
        with self.trouble(number, after):
            self.start(host)

    @precondition(lambda self: self.owner is not None)
    @rule()
    def kill_supervisor(self) -> None:
        assert self.owner is not None
        self.kill(self.owner)

    @precondition(lambda self: self.owner is not None)
    @rule()
    def stop_supervisor(self) -> None:
        supervisor = self.owner
        assert supervisor is not None
        for rank in supervisor.ranks:
            if rank.machine.is_alive:
                self.leave(rank)
        supervisor.member.leave()
        supervisor.held.__exit__(None, None, None)
        self.computers.end_process(supervisor.machine)
        self.supervisors.remove(supervisor)

    @precondition(lambda self: bool(self.living_ranks))
    @rule(data=st.data())
    def kill_rank(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.living_ranks)))

    @precondition(lambda self: self.owner is not None and not any(r.machine.is_alive for r in self.owner.ranks))
    @rule()
    def restart_rank(self) -> None:
        assert self.owner is not None
        self.start_rank(self.owner, None)

    @precondition(lambda self: self.owner is not None)
    @rule(data=st.data(), host=st.sampled_from(HOSTS))
    def go_back(self, data: st.DataObject, host: str) -> None:
        """Rewind: a clean stop, and a start from an earlier checkpoint."""
        self.stop_supervisor()
        steps = sorted(int(path.name.removeprefix("step-")) for path in (self.run / "checkpoints").glob("step-*"))
        if steps:
            self.start(host, data.draw(st.sampled_from(steps)))

    # --- Rules: saves

    @precondition(lambda self: bool(self.living_ranks))
    @rule(data=st.data(), is_best=st.booleans())
    def save_by_a_rank(self, data: st.DataObject, is_best: bool) -> None:
        self.save(data.draw(st.sampled_from(self.living_ranks)), is_best=is_best)

    @precondition(lambda self: bool(self.living_ranks))
    @rule(data=st.data(), number=st.sampled_from(ERRORS), after=st.integers(0, 60))
    def save_while_the_disk_fails(self, data: st.DataObject, number: int, after: int) -> None:
        rank = data.draw(st.sampled_from(self.living_ranks))
        if rank.may_write:
            with self.trouble(number, after):
                self.save(rank)

    @precondition(lambda self: any(rank.may_write for rank in self.living_ranks))
    @rule(after=st.integers(0, 60))
    def kill_in_the_middle_of_a_save(self, after: int) -> None:
        rank = next(rank for rank in self.living_ranks if rank.may_write)
        try:
            with self.trouble(None, after):
                self.save(rank)
        except Killed:
            self.is_disk_failing = False
            self.end(rank)

    # --- Rules: the store and readers

    @rule(is_down=st.booleans())
    def store_fails_or_heals(self, is_down: bool) -> None:
        self.is_store_down = is_down

    @precondition(lambda self: any(s.machine.is_alive for s in self.supervisors))
    @rule(data=st.data())
    def mirror_round(self, data: st.DataObject) -> None:
        supervisor = data.draw(st.sampled_from([s for s in self.supervisors if s.machine.is_alive]))
        is_owner = self.owns(supervisor)
        before = dict(MemoryFileSystem.store)
        try:
            supervisor.uploader.upload_new(is_last=True)
        except (TakenOver, stores.StoreError, OwnerLost):
            pass
        else:
            self.arrived = max([step for step in self.steps_on_disk() if step <= self.newest], default=0)
        if not is_owner:
            assert dict(MemoryFileSystem.store) == before

    def steps_on_disk(self) -> list[int]:
        return [store.step_of(path) for path in store.step_folders(self.run / "checkpoints")]

    @precondition(lambda self: self.arrived and not self.is_store_down)
    @rule()
    def fetch_on_another_machine(self) -> None:
        other = RunFolder(self.disk / "other")
        fetch_module.fetch_run(stores.open_store(URL, "here"), other, "", lambda text: None)
        assert max(check_whole(other)) >= self.arrived
        shutil.rmtree(other.path)

    @rule(number=st.sampled_from(ERRORS), after=st.integers(0, 30))
    def a_reader_looks_while_the_disk_fails(self, number: int, after: int) -> None:
        before = read_tree(self.run) if self.run.exists() else {}
        with self.trouble(number, after), suppress(OSError, PacelineError):
            list_checkpoints(self.run / "checkpoints", thorough=True)
            store.find_newest(self.run / "checkpoints")
        assert (read_tree(self.run) if self.run.exists() else {}) == before

    # --- Invariants

    @invariant()
    def there_is_one_writer(self) -> None:
        if hasattr(self, "computers"):
            writers = {rank.member.id for rank in self.living_ranks if rank.may_write}
            writers |= {s.member.id for s in self.supervisors if s.machine.is_alive and self.owns(s)}
            assert len(writers) <= 1

    @invariant()
    def every_reported_checkpoint_can_be_loaded(self) -> None:
        if hasattr(self, "computers") and self.newest:
            found = check_whole(RunFolder(self.run))
            newest, rejected = store.find_newest(self.run / "checkpoints")
            assert newest is not None
            assert rejected == []
            assert newest.step == max(found)
            assert self.newest <= newest.step <= max(self.attempted, self.newest)


TestTwoSupervisorsOnSimulatedMachines = TwoSupervisors.TestCase
# No shrinking: it takes minutes, and the list of steps is enough.
TestTwoSupervisorsOnSimulatedMachines.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=25, deadline=None, phases=[Phase.generate]
)


# --- The state machine can fail


def ranks_outlive_a_takeover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lock, "let_members_save", lambda folder, machine: None)
    patch.setattr(lock, "end_members", lambda folder, owner_id, machine: None)
    patch.setattr(manager_module.CheckpointManager, "_require_owner", lambda self: None, raising=False)
    patch.setattr(RunFolder, "require_owner", lambda self: None)


def saves_are_reported_before_they_are_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager_module.CheckpointManager, "_settle", lambda self: setattr(self, "_failure", None))


# The machine cannot detect other faults, because a second layer catches them: without the owner's id, a takeover still
# ends the ranks; if an unreadable checkpoint counts as damaged, the start still ends. Those have their own tests.
@pytest.mark.parametrize("fault", [ranks_outlive_a_takeover, saves_are_reported_before_they_are_committed])
def test_the_state_machine_detects_an_injected_fault(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each invariant fails for code that breaks it."""
    fault(monkeypatch)
    only_search = settings(max_examples=200, stateful_step_count=25, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(TwoSupervisors, settings=only_search)
