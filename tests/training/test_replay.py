"""One rank takes the steps of a finished run again, with the same bits, and changes nothing in its folder."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.ranks import run_ranks
from harness.runs import quick_config, train_in
from paceline.checkpoints.format import MANIFEST, Manifest, read_manifest
from paceline.checkpoints.ledger import hash_tensors
from paceline.checkpoints.resume import reader_of
from paceline.checkpoints.store import open_checkpoint
from paceline.errors import UserError
from paceline.metrics.recorder import read_rows
from paceline.settings.load import to_yaml
from paceline.training.replay import Replay, gradient_hashes

FLAGS = (
    *(
        "--exact",
        "--lanes",
        "4",
        "--device",
        "cpu",
        "--keep-every-epochs",
        "1",
        "--save-steps",
        "7",
        "--keep-last",
        "5",
    ),
    *("--ema-decay", "0.9", "--clip-norm", "1", "--dropout", "0.3", "--warmup-epochs", "0.5", "--cutmix-alpha", "1"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    run_ranks(2, train_in, str(folder), FLAGS)
    (folder / "config.yaml").write_text(to_yaml(quick_config(*FLAGS)))
    return folder


def stored_hashes(path: Path) -> dict[str, str]:
    checkpoint = open_checkpoint(path)
    readers = {kind: reader_of(checkpoint, kind) for kind in ("model", "optimizer", "ema")}
    return {kind: hash_tensors({name: reader.read(name) for name in reader.shapes}) for kind, reader in readers.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def note_gradients(replay: Replay, seen: dict[int, dict[str, str]]) -> None:
    seen[replay.step + 1] = gradient_hashes(replay)


def test_one_rank_replays_every_checkpoint_of_two_ranks(run: Path) -> None:
    before = contents(run)
    norms = {row["step"]: row["grad_norm"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"}
    with Replay(run) as replay:
        assert list(replay.stored) == [7, 9, 14, 18]
        for end in replay.stored:
            replay.start_at(replay.nearest_start(end))
            assert replay.trained.can_give_same_bits
            seen: dict[int, dict[str, str]] = {}
            replay.before_update = partial(note_gradients, replay, seen)
            steps = list(replay.steps(end))
            assert [step.grad_norm for step in steps] == [norms[step.step] for step in steps]
            assert list(seen) == [step.step for step in steps]
            assert replay.hashes() == stored_hashes(replay.stored[end])
    assert contents(run) == before


def test_steps_that_do_not_exist_are_refused(run: Path) -> None:
    with Replay(run) as replay:
        with pytest.raises(UserError, match="no checkpoint of this step") as error:
            replay.start_at(5)
        assert error.value.allowed == "0, 7, 9, 14, 18"
        replay.start_at(18)
        with pytest.raises(UserError, match="does not have this step"):
            list(replay.steps(19))


@pytest.mark.parametrize("number", [-1, 10**7, 2**40, 1.5, "x", None, [1]])
def test_impossible_numbers_of_ranks_and_threads_are_not_used(run: Path, tmp_path: Path, number: Any) -> None:
    """The folder may be a stranger's. So many threads would end this process."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    results = json.loads((copy / "results.json").read_text())
    results["process_metrics"][0]["threads"] = number
    (copy / "results.json").write_text(json.dumps(results))
    for path in (copy / "checkpoints").glob("step-*"):
        manifest = read_manifest(path)
        (path / MANIFEST).write_bytes(Manifest(manifest.files, {**manifest.about, "world_size": number}).to_bytes())
    with Replay(copy) as replay:
        replay.start_at(7)
        assert (replay.trained.ranks, replay.trained.threads) == (1, 0)
