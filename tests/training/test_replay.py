"""One rank takes the steps of a finished run again, with the same bits, and changes nothing in its folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from harness.ranks import run_ranks
from harness.runs import quick_config, train_in
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
