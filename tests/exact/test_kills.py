"""SIGKILL at any moment: no torn checkpoint, and the resumed run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from harness import saving_child
from harness.cli import environment, paceline
from harness.ranks import make_world, run_ranks
from harness.runs import read_results
from paceline.checkpoints import manager as manager_module
from paceline.checkpoints import payload as payload_module
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention, find_newest, open_checkpoint
from paceline.world.detect import World

GONE_DEADLINE_S = 20


def processes_in(folder: Path) -> list[int]:
    """Live processes whose working folder this is; a launcher's death does not end its ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve():
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or a zombie
            continue
    return found


def kill_all_in(folder: Path) -> int:
    """Everything at once, as a machine dies. Returns how many were there."""
    victims = processes_in(folder)
    deadline = time.monotonic() + GONE_DEADLINE_S
    while living := processes_in(folder):
        assert time.monotonic() < deadline, f"still alive: {living}"
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    return len(victims)


@contextmanager
def started(*arguments: str, cwd: Path, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose lines are read while it runs. Nothing of it outlives the block."""
    surroundings = environment(PYTHONUNBUFFERED="1", **extra)
    with (
        (cwd / "stderr.txt").open("w") as errors,
        subprocess.Popen(
            arguments,
            cwd=cwd,
            env=surroundings,
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            kill_all_in(cwd)
    assert processes_in(cwd) == []


# --- Inside a save ----------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """What a killed saver had said, and what it left on the disk."""

    announced: int
    reported: int
    newest: int
    has_leftovers: bool

    @property
    def is_inside_a_save(self) -> bool:
        return self.has_leftovers or self.newest < self.announced


def kill_a_saver(folder: Path, workplace: Path, mode: str, first_step: int, draw: random.Random) -> Kill:
    wait_for, delay_s = first_step + draw.randrange(1, 4), draw.uniform(0, 0.060)
    script = saving_child.__file__
    paths = os.pathsep.join(path for path in sys.path if path)
    with started(
        *(sys.executable, script, str(folder), mode, str(first_step)), cwd=workplace, PYTHONPATH=paths
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == f"saving {wait_for}\n":
                break
        time.sleep(delay_s)  # no waiting for anything: this is the random moment
        process.kill()
        lines += process.stdout
    said = {word: max(int(line.split()[1]) for line in lines if line.startswith(word)) for word in ("saving", "saved ")}
    has_leftovers = bool(list(folder.glob(".tmp-*")))
    for path in step_folders(folder):
        verify(path)
    newest, reports = find_newest(folder)
    assert newest is not None
    assert reports == []
    assert said["saved "] <= newest.step <= said["saving"]
    assert newest.path == step_folders(folder)[0]
    for name in ("model", "optimizer"):
        for value in load_file(newest.path / f"{name}.safetensors").values():
            assert value.unique().tolist() == [newest.step]
    if (folder / "best").exists():
        assert open_checkpoint(folder / "best").step % 3 == 0
    assert open_checkpoint(folder / "latest").step in (newest.step, newest.step - 1)
    return Kill(said["saving"], said["saved "], newest.step, has_leftovers)


def check_kills_inside_saves(tmp_path: Path, mode: str, *, times: int) -> list[Kill]:
    folder, workplace = tmp_path / "checkpoints", tmp_path / "workplace"
    workplace.mkdir()
    draw = random.Random(f"{mode} {times}")
    kills: list[Kill] = []
    step = 1
    for _ in range(times):
        kills.append(kill_a_saver(folder, workplace, mode, step, draw))
        open_manager(folder)
        assert not list(folder.glob(".tmp-*"))  # cleared away at the next start
        assert {path.name for path in folder.iterdir()} >= {"latest", f"step-{kills[-1].newest:08}"}
        step = kills[-1].newest + 1
    inside = sum(kill.is_inside_a_save for kill in kills)
    print(
        f"{mode}: {inside} of {times} kills inside a save, {sum(kill.has_leftovers for kill in kills)} with leftovers"
    )
    assert inside > times / 3
    assert any(kill.has_leftovers for kill in kills)
    return kills


def open_manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, make_world(0, 1), is_sharded=False, retention=Retention(), is_async=False)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_killed_at_a_few_moments_is_never_torn(tmp_path: Path, mode: str) -> None:
    check_kills_inside_saves(tmp_path, mode, times=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_killed_at_fifteen_moments_is_never_torn(tmp_path: Path, mode: str) -> None:
    check_kills_inside_saves(tmp_path, mode, times=15)


# --- A whole run ------------------------------------------------------------------------------------------------------

QUICK = [
    *("train", "shapes-cnn", "--num-samples=640", "--global-batch-size=64", "--epochs=2", "--log-frequency=1"),
    *("--track", "--save-steps=2", "--output-dir=run"),
]
LAST_STEP = 18


def outcome(folder: Path) -> dict[str, object]:
    results = read_results(folder)
    lines = (folder / "metrics.csv").read_text().splitlines()
    hashes = {name: results.get(name) for name in ("weights_sha256", "optimizer_sha256", "test_loss", "steps")}
    return {**hashes, "metrics": [line.rpartition(",")[0] for line in lines]}


def kill_at_step(arguments: list[str], cwd: Path, step: int, delay_s: float) -> int:
    """Start a run, kill all of it soon after a step was announced; returns how many processes died."""
    with started(sys.executable, "-m", "paceline", *arguments, cwd=cwd) as process:
        assert process.stdout is not None
        assert any(line.startswith(f"step {step}/") for line in process.stdout), (cwd / "stderr.txt").read_text()
        time.sleep(delay_s)  # no waiting for anything: this is the random moment
        return kill_all_in(cwd)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What comes of the same two-rank run when nobody kills it, for each strategy."""
    outcomes = {}
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path_factory.mktemp(strategy)
        answer = paceline(*QUICK, "--processes=2", f"--strategy={strategy}", cwd=folder)
        assert answer.code == 0, answer
        outcomes[strategy] = outcome(folder / "run")
        assert len(str(outcomes[strategy]["weights_sha256"])) == 64
    return outcomes


def check_killed_run(seed: int, tmp_path: Path, undisturbed: dict[str, dict[str, object]]) -> None:
    draw = random.Random(seed)
    strategy = "fsdp" if seed % 3 == 0 else "ddp"
    flags = [*QUICK, "--processes=2", f"--strategy={strategy}"]
    step, delay_s = draw.randrange(1, LAST_STEP - 1), draw.uniform(0, 0.05)  # never after its end
    assert kill_at_step(flags, tmp_path, step, delay_s) >= 3  # the launcher and its two ranks
    assert not (tmp_path / "run" / "results.json").exists()
    for path in step_folders(tmp_path / "run" / "checkpoints"):
        verify(path)
    answer = paceline(*flags, "--resume=auto", cwd=tmp_path)
    assert answer.code == 0, answer
    # Step 3 comes after the save of step 2 began, and a second save waits for the first.
    assert ("resumed   at step" in answer.out) or step < 5
    assert outcome(tmp_path / "run") == undisturbed[strategy]


FEW = (3, 7, 8, 12)


@pytest.mark.parametrize("seed", FEW)
def test_a_killed_run_ends_like_the_undisturbed_one(
    seed: int, tmp_path: Path, undisturbed: dict[str, dict[str, object]]
) -> None:
    check_killed_run(seed, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(20))
def test_twenty_killed_runs_end_like_the_undisturbed_one(
    seed: int, tmp_path: Path, undisturbed: dict[str, dict[str, object]]
) -> None:
    check_killed_run(seed, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exact_with_a_kill_at_each_change_of_the_world(tmp_path: Path) -> None:
    model = Path(saving_child.__file__).with_name("batchnorm_model.py")
    flags = [*QUICK, "--exact", "--lanes=4", f"--model-name={model}:build"]
    for name in ("whole", "moved"):
        (tmp_path / name).mkdir()
    answer = paceline(*flags, "--processes=1", cwd=tmp_path / "whole")
    assert answer.code == 0, answer
    resumed_at = []
    for processes, step in ((4, 4), (2, 9), (1, 13)):
        killed = kill_at_step(
            [*flags, f"--processes={processes}", "--resume=auto"], tmp_path / "moved", step, delay_s=0.02
        )
        assert killed >= processes
        resumed_at.append(open_checkpoint(tmp_path / "moved" / "run" / "checkpoints" / "latest").step)
    answer = paceline(*flags, "--processes=4", "--resume=auto", cwd=tmp_path / "moved")
    assert answer.code == 0, answer
    assert resumed_at == sorted(set(resumed_at))  # each world took it some way further
    assert outcome(tmp_path / "moved" / "run") == outcome(tmp_path / "whole" / "run")
    assert read_results(tmp_path / "moved" / "run")["optimizer_sha256"]


# --- A save that ends in another way ----------------------------------------------------------------------------------


def save_once(manager: CheckpointManager, step: int) -> None:
    import torch

    state = {"step": step, "keep": False, "validation": None}
    manager.save({"model": {"w": torch.full((3,), float(step))}}, state, {"step": step}, is_best=False)


def test_an_interrupt_inside_a_save_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    manager = open_manager(tmp_path)
    monkeypatch.setattr(manager_module, "write_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_once(manager, 1)
    assert step_folders(tmp_path) == []


@pytest.mark.parametrize("step", [2, 1])
def test_a_drop_that_is_cut_short_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    # The older one is dropped after the newer was committed; one of the same step, in its stead.
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


def test_what_reads_back_differently_is_not_committed(
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
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))
    manager = CheckpointManager(Path(folder), world, is_sharded=True, retention=Retention(), is_async=True)
    write, counts = manager_module.write_pieces, []
    for step in (1, 2, 3):
        payload = {"model": {"w": distribute_tensor(torch.full((4, 2), float(step)), mesh, [Shard(0)])}}
        if step == 2 and world.rank == 1:
            manager_module.write_pieces = fail_to_write
        manager.save(payload, {"step": step, "keep": False, "validation": None}, {"step": step}, is_best=False)
        manager.wait()
        manager_module.write_pieces = write
        counts.append(manager._failures_in_a_row)
    return counts


def fail_to_write(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_on_another_rank_is_heard_at_once(tmp_path: Path) -> None:
    # At once: the primary would otherwise wait for that rank's note longer than the harness waits for an answer.
    assert run_ranks(2, fail_on_the_second_rank, str(tmp_path)) == [[0, 1, 0], [0, 1, 0]]
    assert [step_of(path) for path in step_folders(tmp_path)] == [3]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_run_that_went_back_leaves_no_later_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    manager = CheckpointManager(
        tmp_path, make_world(0, 1), is_sharded=False, retention=Retention(keep_last=9), is_async=False
    )
    for step in (2, 4, 6, 8):
        save_once(manager, step)
    save_once(manager, 5)  # as a run does that was resumed from step 4
    assert [step_of(path) for path in step_folders(tmp_path)] == [5, 4, 2]
    save_once(manager, 8)
    manager.rewind_to(4)
    newest, reports = find_newest(tmp_path)
    assert newest is not None
    assert (newest.step, reports) == (4, [])
    assert {path.name for path in tmp_path.glob("superseded-*")} == {
        "superseded-step-00000005",
        "superseded-step-00000008",
    }
    save_once(manager, 6)  # its successor is verified: now they may go
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("latest", "step-00000002", "step-00000004", "step-00000006"),
    ]
