"""Commands that only read a run do not change its checkpoints. Only the owner sets a damaged one aside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from faults.damage import cut, delete, flip_a_bit
from faults.finished_run import BEFORE, DAMAGED, NEWEST
from faults.test_outages import snapshot
from paceline.checkpoints import store
from paceline.checkpoints.difference import compare_newest
from paceline.cli.main import main
from paceline.errors import CheckpointError
from paceline.library.run import load_run


def look_at_model(run: Path, _: Path) -> int:
    load_run(run).model()
    return 0


def predict(run: Path, picture: Path) -> int:
    return main(["predict", str(run), str(picture)])


COMMANDS: dict[str, Callable[[Path, Path], int]] = {
    "evaluate": lambda run, _: main(["evaluate", str(run)]),
    "predict": predict,
    "export": lambda run, _: main(["export", str(run), "--format=safetensors", f"--output={run.parent}/out"]),
    "checkpoints": lambda run, _: main(["checkpoints", str(run), "--verify"]),
    "model": look_at_model,
    "model of the latest": lambda run, _: int(load_run(run).model("latest") is None),
    "runs": lambda run, _: main(["runs", str(run.parent)]),
    "status": lambda run, _: main(["status", str(run)]),
    "resume elsewhere": lambda run, _: int(store.find_newest(run / "checkpoints")[0] is None),
}
DAMAGES: dict[str, Callable[[Path], None]] = {
    "short": lambda path: cut("model.safetensors", lambda size: size // 2, path),
    "flipped": lambda path: flip_a_bit("model.safetensors", 0.5, 0, path),
    "gone": lambda path: delete("manifest.json", path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_readers_change_nothing_in_a_run_with_a_damaged_newest_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Inode, size and time of every file stay the same, and the reader uses the checkpoint before."""
    monkeypatch.setattr(store, "RETRY_PAUSE_S", 0.0)
    store.point(run / "checkpoints", "best", run / "checkpoints" / NEWEST)
    DAMAGES[damage](run / "checkpoints" / NEWEST)
    picture = run.parent / "picture.png"
    Image.new("RGB", (32, 32)).save(picture)
    before = {name: found for name, found in snapshot(run).items() if name != str(run)}
    threads = torch.get_num_threads()
    for name, command in COMMANDS.items():
        assert command(run, picture) == (DAMAGED if name == "checkpoints" else 0), name
        (run / "evaluation.json").unlink(missing_ok=True)  # the output of `evaluate`
        after = {name: found for name, found in snapshot(run).items() if name != str(run)}
        assert after == before, name
    torch.set_num_threads(threads)
    with pytest.raises(CheckpointError):
        compare_newest(run, run)
    assert {name: found for name, found in snapshot(run).items() if name != str(run)} == before
    newest, rejected = store.find_newest(run / "checkpoints", prefer_best=True)
    assert newest is not None
    assert (newest.path.name, [item.path.name for item in rejected]) == (BEFORE, [NEWEST])


def test_a_file_with_a_wrong_size_is_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second read decides: a network file system may show an old size for a moment."""
    victim = run / "checkpoints" / NEWEST / "model.safetensors"
    content = victim.read_bytes()
    os.truncate(victim, len(content) // 2)
    monkeypatch.setattr(store.time, "sleep", lambda _: victim.write_bytes(content))  # between the two reads
    newest, rejected = store.find_newest(run / "checkpoints")
    assert newest is not None
    assert (newest.path.name, rejected) == (NEWEST, [])
