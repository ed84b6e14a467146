"""Checkpoints on disk: whole or not there, pointed at, pruned, and read without running code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.checkpoints import store
from paceline.checkpoints.store import commit, find_checkpoint, remove_leftovers
from paceline.errors import CheckpointError


def save(folder: Path, step: int, *, is_best: bool = False, keep: bool = False) -> Path:
    payload = {"model": {"weight": torch.full((3,), float(step))}}
    return commit(folder, payload, {"step": step}, is_best=is_best, keep=keep)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_latest_best_and_kept_ones_stay(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, is_best=step == 2, keep=step == 3)
    assert steps_in(tmp_path) == [2, 3, 6]
    assert find_checkpoint(tmp_path / "latest").step == 6
    assert find_checkpoint(tmp_path / "best").step == 2
    assert not list(tmp_path.glob(".tmp-*"))


def test_any_way_of_naming_it_finds_it(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    path = save(folder, 7)
    for name in (tmp_path / "run", folder, folder / "latest", path):
        checkpoint = find_checkpoint(name)
        assert checkpoint.path == path
        assert checkpoint.run_path == tmp_path / "run"
    assert torch.equal(find_checkpoint(path).tensors("model")["weight"], torch.full((3,), 7.0))


def test_a_failed_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full_disk)
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        save(tmp_path, 2)
    assert "No space left" in caught.value.screen()
    assert steps_in(tmp_path) == [1]
    assert find_checkpoint(tmp_path).step == 1
    assert not list(tmp_path.glob(".tmp-*"))


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".tmp-step-00000002").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_damage_is_one_screen(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_checkpoint(tmp_path).tensors("model")
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="unreadable"):
        find_checkpoint(tmp_path)
    (path / "state.json").write_text(json.dumps(["no", "step"]))
    with pytest.raises(CheckpointError, match="unreadable"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path / "elsewhere")
