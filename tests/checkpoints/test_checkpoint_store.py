"""Checkpoints on disk: complete or absent, linked, pruned, and read without executing code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.ranks import make_world, run_ranks
from paceline.checkpoints import manager as manager_module
from paceline.checkpoints import store
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.payload import Box, PayloadReader, Piece, write_pieces
from paceline.checkpoints.store import Retention
from paceline.errors import EXIT_CHECKPOINT, CheckpointError
from paceline.runs.patience import PATIENCE
from paceline.runtime.detect import World


def open_manager(folder: Path, *, is_async: bool = False, **keep: int) -> CheckpointManager:
    world = make_world(0, 1)
    return CheckpointManager(folder, world, is_sharded=False, retention=Retention(**keep), is_async=is_async)


def save(manager: CheckpointManager, step: int, *, accuracy: float | None = None, **flags: Any) -> None:
    validation = None if accuracy is None else {"accuracy": accuracy, "loss": 1.0}
    state = {"step": step, "keep": flags.pop("keep", False), "validation": validation}
    payload = {"model": {"weight": torch.full((3,), float(step)), "count": torch.tensor(step)}}
    manager.save(payload, state, {"step": step}, is_best=flags.pop("is_best", False))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.mark.parametrize("is_async", [False, True])
def test_latest_best_and_kept_checkpoints_are_not_pruned(tmp_path: Path, is_async: bool) -> None:
    manager = open_manager(tmp_path, is_async=is_async, keep_last=2, keep_best=2)
    for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.8, 0.2, 0.4, 0.5], start=1):
        save(manager, step, accuracy=accuracy, is_best=step == 2, keep=step == 3)
    manager.wait()
    assert steps_in(tmp_path) == [2, 3, 4, 6, 7]  # best two: 2 and 4; kept: 3; last two: 6 and 7
    assert store.open_checkpoint(tmp_path / "latest").step == 7
    assert store.open_checkpoint(tmp_path / "best").step == 2
    assert not list(tmp_path.glob(".tmp-*"))


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2).bfloat16(),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 5),
        "strided": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    pieces = {n: Piece(t, Box((0,) * t.dim(), tuple(t.shape)), tuple(t.shape)) for n, t in tensors.items()}
    seal = write_pieces(tmp_path / "x.safetensors", pieces)
    assert seal.size_bytes == (tmp_path / "x.safetensors").stat().st_size
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in read)


@pytest.mark.parametrize("cut", [(4, 6), (1, 9), (10, 0), (3, 3, 4)])
def test_any_box_is_read_from_any_slicing(tmp_path: Path, cut: tuple[int, ...]) -> None:
    whole = torch.arange(50.0).view(10, 5)
    start, names = 0, []
    for number, rows in enumerate(cut):
        names.append(f"part-{number}.safetensors")
        part = whole[start : start + rows]
        write_pieces(tmp_path / names[-1], {"w": Piece(part, Box((start, 0), tuple(part.shape)), (10, 5))})
        start += rows
    reader = PayloadReader(tmp_path, names)
    assert reader.shapes == {"w": (10, 5)}
    assert torch.equal(reader.read("w"), whole)
    for box in [Box((0, 0), (2, 5)), Box((3, 1), (4, 3)), Box((9, 0), (1, 5)), Box((10, 0), (0, 5))]:
        assert torch.equal(reader.read("w", box), whole[box.slices((0, 0))])


def test_a_missing_slice_is_detected(tmp_path: Path) -> None:
    part = torch.zeros(4, 5)
    write_pieces(tmp_path / "part.safetensors", {"w": Piece(part, Box((0, 0), (4, 5)), (10, 5))})
    with pytest.raises(CheckpointError, match="missing"):
        PayloadReader(tmp_path, ["part.safetensors"]).read("w")


def fail_to_write(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_save_is_a_warning_and_three_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    monkeypatch.setenv(PATIENCE, "0")
    manager = open_manager(tmp_path, is_async=is_async)
    save(manager, 1)
    manager.wait()
    monkeypatch.setattr(manager_module, "write_pieces", fail_to_write)
    for step in (2, 3):
        save(manager, step)
        manager.wait()
    with pytest.raises(CheckpointError, match="3 checkpoints in a row") as caught:  # noqa: PT012 - either may tell
        save(manager, 4)
        manager.wait()
    assert "No space left" in caught.value.screen()
    assert [record.message.count("could not be saved") for record in caplog.records] == [1, 1, 1]
    assert steps_in(tmp_path) == [1]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_short_outage_does_not_end_a_run_that_saves_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many failures within the allowed time of an outage are warnings."""
    monkeypatch.setenv(PATIENCE, "60")
    manager = open_manager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "write_pieces", fail_to_write)
        for step in range(1, 20):
            save(manager, step)
    save(manager, 20)
    assert steps_in(tmp_path) == [20]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_last_save_is_retried_until_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """A run does not finish while its last checkpoint is missing."""
    write, calls = manager_module.write_pieces, []

    def fail_twice(*arguments: Any) -> Any:
        calls.append(arguments)
        return fail_to_write() if len(calls) <= 2 else write(*arguments)

    manager = open_manager(tmp_path, is_async=is_async)
    monkeypatch.setattr(manager_module, "write_pieces", fail_twice)
    save(manager, 7)
    manager.finish()
    assert (steps_in(tmp_path), manager.saved_step) == ([7], 7)


def test_a_last_save_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the allowed time of an outage, the exit code is 4, not 0."""
    monkeypatch.setenv(PATIENCE, "0")
    manager = open_manager(tmp_path)
    monkeypatch.setattr(manager_module, "write_pieces", fail_to_write)
    save(manager, 7)
    with pytest.raises(CheckpointError) as caught:
        manager.finish()
    assert caught.value.exit_code == EXIT_CHECKPOINT


def test_a_successful_save_resets_the_count_of_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_manager(tmp_path)
    for step in range(1, 10):
        with monkeypatch.context() as patch:
            if step % 3:
                patch.setattr(manager_module, "write_pieces", fail_to_write)
            save(manager, step)
    assert steps_in(tmp_path) == [9]


def test_a_full_disk_is_detected_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_manager(tmp_path)
    monkeypatch.setattr(store, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(manager_module, "write_pieces", lambda *_: pytest.fail("wrote"))
    save(manager, 1)
    assert manager._failures_in_a_row == 1
    assert steps_in(tmp_path) == []


def test_too_little_space_is_reported_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(tmp_path)
    monkeypatch.setattr(store, "free_bytes", lambda _: 150)
    manager.warn_if_space_is_short(75)
    assert caplog.records == []
    manager.warn_if_space_is_short(76)
    assert "do not fit" in caplog.text


def test_training_does_not_change_staged_copies(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, is_async=True)
    weight = torch.ones(1000)
    state = {"step": 1, "keep": False, "validation": None}
    manager.save({"model": {"weight": weight}}, state, {"step": 1}, is_best=False)
    weight.fill_(2.0)
    manager.wait()
    assert torch.equal(load_file(tmp_path / "latest" / "model.safetensors")["weight"], torch.ones(1000))


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    save(open_manager(tmp_path), 1)
    (tmp_path / ".tmp-step-00000002").mkdir()
    (tmp_path / ".tmp-latest").symlink_to("nowhere")
    open_manager(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def save_sharded(world: World, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))
    values = torch.arange(35.0).view(7, 5)
    payload = {"model": {"w": distribute_tensor(values, mesh, [Shard(0)]), "b": torch.ones(2)}}
    manager = CheckpointManager(Path(folder), world, is_sharded=True, retention=Retention(), is_async=True)
    manager.save(payload, {"step": 3, "keep": False, "validation": None}, {"step": 3}, is_best=True)
    manager.wait()


def test_ranks_write_their_own_slices(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path))
    checkpoint = store.open_checkpoint(tmp_path / "best")
    names = checkpoint.files_of("model")
    assert names == [f"model-{rank:05}-of-00003.safetensors" for rank in range(3)]
    reader = PayloadReader(checkpoint.path, names)
    assert torch.equal(reader.read("w"), torch.arange(35.0).view(7, 5))
    assert torch.equal(reader.read("b"), torch.ones(2))
    assert sorted(path.name for path in checkpoint.path.iterdir()) == ["manifest.json", *names, "state.json"]


def test_the_manifest_names_its_origin(tmp_path: Path) -> None:
    save(open_manager(tmp_path), 5)
    manifest = json.loads((tmp_path / "latest" / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["about"] == {"step": 5}
    assert set(manifest["files"]) == {"model.safetensors", "state.json"}
