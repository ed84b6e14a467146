"""Faults 5 and 6: a save that is killed or interrupted at any time leaves no partial checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults.saving_child import save_for_ever, save_when_asked_to_stop
from harness.cli import paceline
from harness.processes import kill_all_in, started
from harness.ranks import make_world, run_ranks
from harness.runs import read_results
from harness.short_run import FLAGS, STEPS
from paceline.checkpoints import manager as manager_module
from paceline.checkpoints import payload as payload_module
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention, find_newest, list_set_aside, open_checkpoint
from paceline.errors import EXIT_PREEMPTED
from paceline.runtime.detect import World

Child = Callable[..., None]
FORKSERVER = multiprocessing.get_context("forkserver")  # set up by harness.ranks, with torch preloaded


@dataclass
class Kill:
    """The reports of a killed saver, and the files that it left."""

    announced: int  # the step of its last save
    newest: int
    has_leftovers: bool

    @property
    def is_inside_a_save(self) -> bool:
        return self.has_leftovers or self.newest < self.announced


def kill_a_saver(folder: Path, child: Child, is_async: bool, first_step: int, draw: random.Random) -> Kill:
    """Start a saver, kill it at a random time, and check every checkpoint that it left."""
    reader, writer = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=child, args=(str(folder), is_async, first_step, writer))
    process.start()
    writer.close()
    said: list[tuple[str, int]] = []
    if child is save_for_ever:
        moment, delay_s = ("saving", first_step + draw.randrange(1, 4)), draw.uniform(0, 0.060)
    else:
        moment, delay_s = ("training", first_step), draw.uniform(0, 0.4)
    while not said or said[-1] != moment:
        said.append(reader.recv())
    assert process.pid is not None
    if child is save_when_asked_to_stop:
        os.kill(process.pid, signal.SIGTERM)
    time.sleep(delay_s)  # not a synchronisation: this is the random time
    process.kill()
    process.join()
    while True:
        try:
            said.append(reader.recv())
        except EOFError:
            break
    steps = {word: [step for spoken, step in said if spoken == word] for word in ("saving", "saved")}
    announced = max([first_step, *steps["saving"]])
    newest = check_every_checkpoint(folder)
    assert max([first_step if child is save_when_asked_to_stop else 0, *steps["saved"]]) <= newest <= announced
    return Kill(announced, newest, bool(list(folder.glob(".tmp-*"))))


def check_every_checkpoint(folder: Path) -> int:
    """Every visible checkpoint is complete and of one step. Returns the newest step."""
    for path in step_folders(folder):
        verify(path)
    newest, reports = find_newest(folder)
    assert newest is not None
    assert reports == []
    assert newest.path == step_folders(folder)[0]
    for name in ("model", "optimizer"):
        for value in load_file(newest.path / f"{name}.safetensors").values():
            assert value.min().item() == value.max().item() == newest.step
    if (folder / "best").exists():
        assert open_checkpoint(folder / "best").step % 3 == 0
    assert open_checkpoint(folder / "latest").step in (newest.step, newest.step - 1)
    return newest.step


def check_kills(folder: Path, child: Child, is_async: bool, *, times: int, seed: int) -> None:
    draw = random.Random(f"{is_async} {seed}")
    kills: list[Kill] = []
    step = 1
    # The time of a kill is random. Continue until one kill was inside a save.
    while len(kills) < times or (not any(kill.has_leftovers for kill in kills) and len(kills) < 10 * times):
        kills.append(kill_a_saver(folder, child, is_async, step, draw))
        open_manager(folder)
        assert not list(folder.glob(".tmp-*"))  # removed at the next start
        assert {path.name for path in folder.iterdir()} >= {"latest", f"step-{kills[-1].newest:08}"}
        step = kills[-1].newest + (child is save_for_ever)
    inside = sum(kill.is_inside_a_save for kill in kills)
    leftovers = sum(kill.has_leftovers for kill in kills)
    print(f"{inside} of {len(kills)} kills inside a save, {leftovers} with leftovers, 0 torn")
    assert leftovers > 0
    if child is save_for_ever:
        assert inside > 0


def open_manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, make_world(0, 1), is_sharded=False, retention=Retention(), is_async=False)


# Fault 5: the grace after SIGTERM is too short for the save.


@pytest.mark.faults
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_ten_saves_killed_within_the_grace_keep_the_checkpoint_before(tmp_path: Path, is_async: bool) -> None:
    check_kills(tmp_path / "checkpoints", save_when_asked_to_stop, is_async, times=10, seed=5)


# Fault 6: thirty kills inside a save, six of them in every `make test`.


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_save_killed_at_a_few_times_is_never_partial(tmp_path: Path, is_async: bool) -> None:
    check_kills(tmp_path / "checkpoints", save_for_ever, is_async, times=3, seed=3)


@pytest.mark.faults
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_save_killed_at_twelve_more_times_is_never_partial(tmp_path: Path, is_async: bool) -> None:
    check_kills(tmp_path / "checkpoints", save_for_ever, is_async, times=12, seed=6)


# --- A save that ends in another way ----------------------------------------------------------------------------------


def save_once(manager: CheckpointManager, step: int) -> None:
    state = {"step": step, "keep": False, "validation": None}
    manager.save({"model": {"w": torch.full((3,), float(step))}}, state, {"step": step}, is_best=False)


def test_an_interrupt_inside_a_save_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    manager = open_manager(tmp_path)
    monkeypatch.setattr(manager_module, "write_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_once(manager, 1)
    assert step_folders(tmp_path) == []


@pytest.mark.parametrize("step", [2, 1])
def test_an_interrupted_prune_leaves_no_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    # An older checkpoint is dropped after the commit of a newer one, or of one of the same step that replaces it.
    def delete_one_file(path: Path, **_: object) -> None:
        cut_short.append(path)
        (path / "model.safetensors").unlink()
        raise KeyboardInterrupt

    cut_short: list[Path] = []
    manager = open_manager(tmp_path)
    save_once(manager, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_one_file)
        with pytest.raises(KeyboardInterrupt):
            save_once(manager, step)
    assert len(cut_short) == 1
    assert [step_of(path) for path in step_folders(tmp_path)] == [step]
    verify(tmp_path / f"step-{step:08}")
    open_manager(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", f"step-{step:08}"]


def test_a_checkpoint_that_reads_back_differently_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(tmp_path)
    save_once(manager, 1)
    sum_and_read_back = payload_module._sum_and_read_back

    def read_another_bit(descriptor: int, *others: Any) -> tuple[int, int]:
        checksum, read_back = sum_and_read_back(descriptor, *others)
        return checksum, read_back ^ 1

    monkeypatch.setattr(payload_module, "_sum_and_read_back", read_another_bit)
    save_once(manager, 2)
    assert "reads back as something else" in caplog.text
    assert [step_of(path) for path in step_folders(tmp_path)] == [1]
    assert not list(tmp_path.glob(".tmp-*"))


def fail_on_the_second_rank(world: World, folder: str) -> list[int]:
    """Three saves; rank 1 cannot write its part of the second."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))
    manager = CheckpointManager(Path(folder), world, is_sharded=True, retention=Retention(), is_async=True)
    module: Any = manager_module
    write, counts = module.write_pieces, []
    for step in (1, 2, 3):
        payload: dict[str, dict[str, torch.Tensor]] = {}
        payload["model"] = {"w": distribute_tensor(torch.full((4, 2), float(step)), mesh, [Shard(0)])}
        if step == 2 and world.rank == 1:
            module.write_pieces = fail_to_write
        manager.save(payload, {"step": step, "keep": False, "validation": None}, {"step": step}, is_best=False)
        manager.wait()
        module.write_pieces = write
        counts.append(manager._failures_in_a_row)
    return counts


def fail_to_write(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_on_another_rank_is_reported_at_once(tmp_path: Path) -> None:
    # Otherwise the primary would wait for that rank longer than the time limit of the harness.
    assert run_ranks(2, fail_on_the_second_rank, str(tmp_path)) == [[0, 1, 0], [0, 1, 0]]
    assert [step_of(path) for path in step_folders(tmp_path)] == [3]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_rewound_run_leaves_no_later_checkpoint_to_resume_from(tmp_path: Path) -> None:
    manager = CheckpointManager(
        tmp_path, make_world(0, 1), is_sharded=False, retention=Retention(keep_last=9), is_async=False
    )
    for step in (2, 4, 6, 8):
        save_once(manager, step)
    manager.rewind_to(4)
    save_once(manager, 5)  # like a run that was resumed from step 4
    assert [step_of(path) for path in step_folders(tmp_path)] == [5, 4, 2]
    save_once(manager, 8)
    manager.rewind_to(4)
    newest, reports = find_newest(tmp_path)
    assert newest is not None
    assert (newest.step, reports) == (4, [])  # a restart before the next save also resumes from there
    assert [path.name for path in list_set_aside(tmp_path)] == ["superseded-step-00000005", "superseded-step-00000008"]
    save_once(manager, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("latest", "step-00000002", "step-00000004", "step-00000006"),
    ]


# Fault 5 with complete commands: each is killed within its grace, and the next one resumes.


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_commands_killed_within_their_grace_always_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    reached, codes = 0, []
    for moment, grace in ((13, 0.0), (18, 0.05), (23, 0.15), (28, 0.4)):
        with started(*FLAGS, "--resume=auto", cwd=tmp_path) as run:
            run.wait_for(f"step {moment}/")
            os.kill(run.process.pid, signal.SIGTERM)
            time.sleep(grace)  # not a synchronisation: this is the grace
            kill_all_in(tmp_path)
            codes.append(run.wait())
        for path in step_folders(folder):
            verify(path)
        newest, reports = find_newest(folder)
        assert newest is not None
        assert reports == []
        # Each save waits for the save before it, five steps earlier.
        assert max(reached, moment - 9) <= newest.step
        reached = newest.step
    assert codes[0] == -signal.SIGKILL  # zero grace is always too short; the others may be long enough
    assert set(codes) <= {-signal.SIGKILL, EXIT_PREEMPTED}
    answer = paceline(*FLAGS, "--resume=auto", cwd=tmp_path)
    assert answer.code == 0, answer
    assert f"resumed   at step {reached}" in answer.out
    assert read_results(tmp_path / "run")["steps"] == STEPS
    assert not list(folder.glob(".tmp-*"))
