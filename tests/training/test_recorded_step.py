"""Steps that a GPU replays from a recording equal plain steps. The warm-up changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.parallel.apply import ParallelModel
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import ALONE, World, build_world
from paceline.runtime.recorded import Recorded
from paceline.settings.faults import parse_faults
from paceline.settings.load import load_config
from paceline.training import recorded_step
from paceline.training.components import build_components
from paceline.training.inject import Faults
from paceline.training.loop import train

QUICK = ["--num-samples=320", "--epochs=2", "--global-batch-size=64", "--track", "--device=cpu", "--omp-num-threads=1"]


class FakeRecording:
    """Replaces a recording without a GPU: does the work itself each time."""

    def __init__(self, work: Callable[..., Any], *_: Any, **__: Any) -> None:
        self._work = work

    def __call__(self, *inputs: Tensor) -> Any:
        return self._work(*inputs)

    def prepare(self, *inputs: Tensor) -> None:
        for _ in range(3):
            self(*inputs)

    def forget(self) -> None:
        pass

    @property
    def is_recorded(self) -> bool:
        return True


class RefusedAtFirst(FakeRecording):
    """Gradients cannot be recorded. A recorded update would always use the gradients of the recording."""

    def __init__(self, work: Callable[..., Any], *_: Any, **__: Any) -> None:
        super().__init__(work)
        self._old: list[Tensor] | None = None

    @property
    def is_recorded(self) -> bool:
        return self._old is not None

    def _trained(self) -> Any:
        return getattr(self._work, "__self__")._trained  # noqa: B009 - `Callable` has no such attribute for mypy

    def prepare(self, *inputs: Tensor) -> None:
        super().prepare(*inputs)
        if self._work.__name__ == "_apply_gradients":
            self._old = [parameter.grad.clone() for parameter in self._trained()]

    def __call__(self, *inputs: Tensor) -> Any:
        if self._old is not None:
            for parameter, gradient in zip(self._trained(), self._old, strict=True):
                parameter.grad = gradient
        return self._work(*inputs)


def weights_after(folder: Path, *flags: str) -> str:
    config = load_config("shapes-cnn", [*QUICK, *flags]).config
    RunFolder(folder).create()
    results = train(config, build_world(config.parallel, ALONE), RunPlace(folder, None, False))
    return results.hashes["weights_sha256"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer=nesterov", "--clip-norm=0.5"),
        pytest.param(
            ("--optimizer=adamw", "--base-lr=0.001", "--ema-decay=0.9", "--accumulate=2"), marks=pytest.mark.long
        ),
        pytest.param(("--optimizer=muon", "--base-lr=0.02", "--dropout=0.4", "--accumulate=4"), marks=pytest.mark.long),
    ],
)
def test_a_fake_recording_on_the_cpu_gives_the_bits_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    plain = weights_after(tmp_path / "plain", *flags)
    taken = []
    monkeypatch.setattr(recorded_step, "can_record", lambda *_: taken.append(1) or True)
    monkeypatch.setattr(recorded_step, "Recorded", FakeRecording)
    assert weights_after(tmp_path / "recorded", *flags) == plain
    assert taken


def test_gradients_that_cannot_be_recorded_are_used_by_plain_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = weights_after(tmp_path / "plain")
    monkeypatch.setattr(recorded_step, "can_record", lambda *_: True)
    monkeypatch.setattr(recorded_step, "Recorded", RefusedAtFirst)
    assert weights_after(tmp_path / "refused") == plain


class Stateful:
    """Work that counts its calls, in state that the host can read."""

    def __init__(self, changes: bool) -> None:
        self.changes, self.count = changes, 0

    def work(self, inputs: Tensor) -> Tensor:
        self.count += self.changes
        return inputs + 1

    def read(self) -> int:
        return self.count


@pytest.mark.parametrize("changes", [False, True])
def test_work_that_changes_host_state_is_never_recorded(monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    """Each call may differ. The recording itself needs a GPU and is not tested here."""
    stateful = Stateful(changes)
    recordings: list[Any] = []
    work = Recorded(stateful.work, stateful.read)
    monkeypatch.setattr(work, "_record", recordings.append)
    for _ in range(4):
        assert work(torch.ones(1)) == 2
    assert len(recordings) == (0 if changes else 2)  # tried at every call from the third on


@pytest.mark.parametrize("others_can", [True, False])
def test_work_is_recorded_on_all_ranks_or_on_none(monkeypatch: pytest.MonkeyPatch, others_can: bool) -> None:
    """A rank that replays a collective would wait for the others. The answer of the others is simulated."""
    asked: list[bool] = []
    recordings: list[Any] = []
    work = Recorded(torch.neg, plain_calls=5, agree=lambda can: (asked.append(can), can and others_can)[1])
    monkeypatch.setattr(work, "_record", recordings.append)
    for _ in range(7):
        assert work(torch.ones(1)) == -1
    assert asked == [True]
    assert len(recordings) == (2 if others_can else 0)


GPU = World(0, 1, 0, 1, "this process", "host", "cuda:0", "nccl", 1)


@pytest.mark.parametrize(
    ("flags", "world", "is_possible"),
    [
        ((), GPU, True),
        (("--exact", "--lanes=4"), GPU, True),
        (("--inject=kill step=5",), GPU, True),
        (("--inject=kill step=5 phase=backward",), GPU, False),
        (("--inject=inf-gradient step=5",), GPU, False),
        (("--compile=never",), GPU, False),
        (("--amp", "--amp-dtype=fp16"), GPU, False),
        ((), replace(GPU, world_size=2), True),
        ((), replace(GPU, world_size=2, backend="gloo", ranks_per_gpu=2), False),
        (("--sync-bn",), replace(GPU, world_size=2), False),
        ((), replace(GPU, device="cpu", backend="gloo"), False),
    ],
)
def test_which_steps_are_recorded(flags: tuple[str, ...], world: World, is_possible: bool) -> None:
    config = load_config("shapes-cnn", list(flags)).config
    dtype = torch.float16 if "--amp-dtype=fp16" in flags else None
    model = ParallelModel(torch.nn.Linear(1, 1), None, "single", dtype)
    assert recorded_step.can_record(model, config, world) is is_possible


def test_a_gpu_cannot_hang_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as refused:
        Faults(parse_faults("gpu-hang rank=0 step=3"), 0, 1, tmp_path / "faults.jsonl", tmp_path)
    assert refused.value.where == "flag --inject"
    Faults(parse_faults("gpu-hang rank=1 step=3"), 0, 1, tmp_path / "faults.jsonl", tmp_path)  # of another rank


def test_the_warm_up_of_a_fake_recording_does_not_change_the_counts_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that counts its calls starts at zero, with and without recorded steps."""
    monkeypatch.setattr(recorded_step, "can_record", lambda *_: True)
    monkeypatch.setattr(recorded_step, "Recorded", FakeRecording)
    config = load_config("shapes-cnn", [*QUICK, "--model-name=harness.branching_model:build_counting"]).config
    components = build_components(config, build_world(config.parallel, ALONE))
    assert isinstance(components.step, recorded_step.RecordedStep)
    assert components.model.module.calls == 0
