"""Every augmentation accepts pictures of any size and shape. Folders use the code path of resident data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo, ResidentDataset
from paceline.data.loader import Loader
from paceline.data.registry import load_dataset
from paceline.runtime.detect import World
from paceline.settings.schema import DataConfig

ONE = World(0, 1, 0, 1, "a test", "here", "cpu", "gloo", 1)
SIZES = [(1, 1), (1, 9), (7, 1), (2, 2), (3, 5), (8, 8), (17, 33), (64, 3), (40, 200)]
EVERYTHING: dict[str, Any] = {
    "color_jitter": 0.4, "hue_jitter": 0.2, "grayscale": 0.3, "blur": 0.5, "solarize": 0.3, "erase": 0.5, "cutout": 3,
    "vertical_flip": True, "mixup_alpha": 0.4, "cutmix_alpha": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("policy", ["randaugment", "trivial", "three"])
@pytest.mark.parametrize("kind", ["none", "light", "gentle", "lively", "imagenet", "resized-crop"])
def test_every_size_works_and_a_sample_does_not_depend_on_its_batch(kind: str, policy: str) -> None:
    for height, width in SIZES:
        for channels in (1, 3):
            shape = (channels, height, width)
            info = DatasetInfo("made", 8, 2, ("a", "b"), shape, (0.5,) * channels, (0.2,) * channels)
            config = DataConfig(augment=kind, policy=policy, image_size=16, **EVERYTHING)  # type: ignore[arg-type]
            pipeline = build_pipeline(config, info, 1)
            samples = torch.randint(256, (8, *shape), generator=torch.Generator().manual_seed(0)).byte()
            ids, labels = torch.arange(8), torch.arange(8) % 2
            drawn = pipeline.draw(ids, pipeline.keys_of(1))
            inputs, targets = pipeline.mix(pipeline.augment(samples, drawn), labels, drawn)
            assert inputs.shape == (8, *pipeline.input_shape)
            assert inputs.isfinite().all()
            assert torch.allclose(targets.sum(1), torch.ones(8))
            assert pipeline.for_evaluation(samples).shape == (8, *pipeline.input_shape)
            pair = pipeline.augment(samples[2:4], pipeline.draw(ids[2:4], pipeline.keys_of(1)))
            assert torch.equal(pipeline.augment(samples, drawn)[2:4], pair)


def test_a_shift_of_a_rectangular_picture_reaches_both_borders() -> None:
    info = DatasetInfo("made", 400, 2, ("a", "b"), (1, 16, 64), (0.0,), (1.0,))
    pipeline = build_pipeline(DataConfig(augment="light", flip=False), info, 1)
    marked = torch.zeros(400, 1, 16, 64, dtype=torch.uint8)
    marked[:, :, 8, 32] = 255
    moved = pipeline.for_training(marked, torch.arange(400), 0).flatten(1).argmax(1)
    rows, columns = moved // 64 - 8, moved % 64 - 32
    assert (int(rows.min()), int(rows.max())) == (-2, 2)  # 1/8 of 16
    assert (int(columns.min()), int(columns.max())) == (-8, 8)  # 1/8 of 64


@pytest.mark.parametrize("kind", ["light", "imagenet", "resized-crop"])
def test_a_folder_and_the_same_samples_in_memory_give_the_same_batches(tmp_path: Path, kind: Any) -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 3)):
        for name in ("ant", "bee"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (10 + 7 * number, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    config = DataConfig(
        dataset="folder", data_dir=str(tmp_path), augment=kind, image_size=16, policy="trivial", **EVERYTHING
    )
    data = load_dataset(config, 0)
    pipeline = build_pipeline(config, data.info, 7)
    ids = torch.arange(24)
    resident = ResidentDataset(data.train.read(ids), data.train.labels)
    for epoch in (0, 1):
        batches = [
            list(
                Loader(dataset, ids, pipeline, ONE).train_epoch(seed=7, epoch=epoch, global_batch_size=8, first_step=0)
            )
            for dataset in (data.train, resident)
        ]
        assert len(batches[0]) == 3
        for from_files, from_memory in zip(*batches, strict=True):
            assert torch.equal(from_files.inputs, from_memory.inputs)
            assert torch.equal(from_files.labels, from_memory.labels)
            assert torch.equal(from_files.ids, from_memory.ids)
    evaluated = [list(Loader(d, ids, pipeline, ONE).evaluation_batches(10)) for d in (data.train, resident)]
    for from_files, from_memory in zip(*evaluated, strict=True):
        assert torch.equal(from_files.inputs, from_memory.inputs)
