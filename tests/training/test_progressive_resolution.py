"""Training with several input sizes: the same bits on other ranks and after a stop, and one size for prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from harness.cli import paceline
from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in
from paceline.checkpoints.store import find_newest
from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo, ResidentDataset
from paceline.data.loader import Loader
from paceline.errors import UserError
from paceline.runtime.detect import ALONE, World, build_world
from paceline.settings.load import load_config
from paceline.settings.schema import DataConfig
from paceline.training import recorded_step
from paceline.training.components import build_components
from paceline.training.input_sizes import require_sizes

ONE = World(0, 1, 0, 1, "a test", "here", "cpu", "gloo", 1)
SIZES = ("--augment=resized-crop", "--resolution-schedule=0:16,1:24,2:20", "--image-size=32", "--test-size=28")
POOLED = ("--model-name=harness.batchnorm_model:build", "--epochs=3", "--num-samples=320")
RIGID = """
import math
from torch import nn

def build(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
"""
EXACT = (*POOLED, *SIZES, "--exact", "--lanes=2")


def hashes(folder: Path) -> tuple[Any, Any]:
    results = read_results(folder)
    return results["weights_sha256"], results["test_loss"]


def test_every_epoch_has_its_size_and_evaluation_has_its_own() -> None:
    info = DatasetInfo("made", 24, 4, ("a", "b"), (3, 40, 36), (0.5,) * 3, (0.2,) * 3)
    samples = torch.randint(256, (24, 3, 40, 36), generator=torch.Generator().manual_seed(0)).byte()
    config = DataConfig(augment="resized-crop", resolution_schedule="0:16,2:24", test_size=28)
    loader = Loader(
        ResidentDataset(samples, torch.arange(24) % 2), torch.arange(24), build_pipeline(config, info, 3), ONE
    )
    shapes = []
    for epoch in range(4):
        (batch,) = loader.train_epoch(seed=3, epoch=epoch, global_batch_size=24, first_step=0)
        shapes.append(batch.inputs.shape[2:])
        plain = loader.pipeline.for_training(samples[batch.ids], batch.ids, epoch)
        assert torch.equal(batch.inputs, plain)
    assert shapes == [(16, 16), (16, 16), (24, 24), (24, 24)]
    assert {batch.inputs.shape[2:] for batch in loader.evaluation_batches(8)} == {(28, 28)}


@pytest.mark.long
def test_one_and_two_ranks_and_a_stop_in_the_middle_give_the_same_bits(tmp_path: Path) -> None:
    """9 steps, 3 per epoch of 16, 24 and 20 pixels. The stops are inside the second and the third epoch."""
    flags = (*EXACT, "--global-batch-size=96")
    run_ranks(1, train_in, str(tmp_path / "one"), flags)
    run_ranks(2, train_in, str(tmp_path / "two"), flags)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    assert step_losses(tmp_path / "one") == step_losses(tmp_path / "two")
    for number, (ranks, stop) in enumerate([(2, 4), (1, 8), (2, 9)]):
        run_ranks(ranks, train_in, str(tmp_path / "moved"), (*flags, f"--max-steps={stop}"), number > 0)
    assert hashes(tmp_path / "moved") == hashes(tmp_path / "one")
    assert step_losses(tmp_path / "moved") == step_losses(tmp_path / "one")


def test_the_record_has_the_test_size_and_prediction_uses_it(tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    flags = (*POOLED, *SIZES, "--max-steps=4", "--global-batch-size=64", "--track", "--output-dir=run")
    trained = paceline("train", "shapes-cnn", *flags, "--processes=1", cwd=tmp_path, PYTHONPATH=tests)
    assert trained.code == 0, trained
    assert read_results(tmp_path / "run")["model_info"]["input_shape"] == [3, 28, 28]
    best = find_newest(tmp_path / "run" / "checkpoints")[0]
    assert best is not None
    record = best.state["record"]
    assert record["input_shape"] == [3, 28, 28]
    assert record["preprocessing"]["image_size"] == 28
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    answer = paceline("predict", "run", "picture.png", cwd=tmp_path, PYTHONPATH=tests)
    assert answer.code == 0, answer


def test_a_model_with_a_fixed_size_is_refused_before_the_first_step(tmp_path: Path) -> None:
    rigid = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))
    require_sizes(rigid, "rigid", {(3, 16, 16)})
    with pytest.raises(UserError, match="20 x 20"):
        require_sizes(rigid, "rigid", {(3, 16, 16), (3, 20, 20)})
    assert rigid.training
    (tmp_path / "mine.py").write_text(RIGID)
    flags = ("--model-name=mine.py:build", *SIZES, "--epochs=3", "--track", "--num-samples=600")
    answer = paceline("train", "shapes-cnn", *flags, cwd=tmp_path)
    assert answer.code == 2, answer
    assert "16 x 16" in answer.err
    assert "step 1" not in answer.out


class FakeRecording:
    """Replaces a recording without a GPU. It refuses inputs of another shape, like a CUDA graph."""

    made = 0

    def __init__(self, work: Any, *_: Any, **__: Any) -> None:
        self._work = work
        self._shapes: list[torch.Size] | None = None

    def __call__(self, *inputs: torch.Tensor) -> Any:
        shapes = [given.shape for given in inputs]
        if self._shapes is None:
            FakeRecording.made += bool(inputs)
            self._shapes = shapes
        assert shapes == self._shapes
        return self._work(*inputs)

    def prepare(self, *inputs: torch.Tensor) -> None:
        for _ in range(3):
            self(*inputs)

    def forget(self) -> None:
        self._shapes = None

    @property
    def is_recorded(self) -> bool:
        return True


def test_a_fake_recording_is_made_again_for_each_size_and_gives_the_bits_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*POOLED, *SIZES, "--global-batch-size=96", "--device=cpu", "--omp-num-threads=1")
    world = build_world(load_config("shapes-cnn", list(flags)).config.parallel, ALONE)
    plain = train_in(world, str(tmp_path / "plain"), flags)
    monkeypatch.setattr(recorded_step, "can_record", lambda *_: True)
    monkeypatch.setattr(recorded_step, "Recorded", FakeRecording)
    assert train_in(world, str(tmp_path / "recorded"), flags)["weights_sha256"] == plain["weights_sha256"]
    assert FakeRecording.made == 3  # once per size


def test_a_resumed_run_is_warmed_up_with_the_size_of_its_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*POOLED, *SIZES, "--global-batch-size=96")
    run_ranks(1, train_in, str(tmp_path / "run"), (*flags, "--max-steps=4"))
    best = find_newest(tmp_path / "run" / "checkpoints")[0]
    config = load_config("shapes-cnn", ["--track", *flags]).config
    seen: list[torch.Size] = []
    monkeypatch.setattr("paceline.training.step.TrainStep.warm_up", lambda _, inputs, labels: seen.append(inputs.shape))
    build_components(config, build_world(config.parallel, ALONE))
    build_components(config, build_world(config.parallel, ALONE), checkpoint=best)
    assert [shape[2] for shape in seen] == [16, 24]
