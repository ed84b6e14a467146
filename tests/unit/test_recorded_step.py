"""Steps that a GPU replays from a recording: the same step as any other, and nothing of its warm-up stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from paceline.config.load import load_config
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.training import recorded_step
from paceline.training.loop import train
from paceline.world.detect import ALONE, build_world

QUICK = ["--num-samples=320", "--epochs=2", "--global-batch-size=64", "--track", "--device=cpu", "--omp-num-threads=1"]


class PlayedAtOnce:
    """Stands in for a recording where there is no GPU: the work itself, each time."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def __call__(self, *inputs: Tensor) -> Any:
        return self._work(*inputs)

    def prepare(self, *inputs: Tensor) -> None:
        for _ in range(3):
            self(*inputs)

    def forget(self) -> None:
        pass


def weights_after(folder: Path, *flags: str) -> str:
    config = load_config("shapes-cnn", [*QUICK, *flags]).config
    RunFolder(folder).create()
    results = train(config, build_world(config.parallel, ALONE), RunPlace(folder, None, False))
    return str(results["weights_sha256"])


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer=nesterov", "--clip-norm=0.5"),
        ("--optimizer=adamw", "--base-lr=0.001", "--ema-decay=0.9", "--accumulate=2"),
        ("--optimizer=muon", "--base-lr=0.02"),
    ],
)
def test_a_fake_recording_on_the_cpu_gives_the_bits_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    plain = weights_after(tmp_path / "plain", *flags)
    taken = []
    monkeypatch.setattr(recorded_step, "can_record", lambda *_: taken.append(1) or True)
    monkeypatch.setattr(recorded_step, "Recorded", PlayedAtOnce)
    assert weights_after(tmp_path / "recorded", *flags) == plain
    assert taken
