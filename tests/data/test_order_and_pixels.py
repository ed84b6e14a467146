"""Order and augmented pixels are pure functions of (seed, epoch, sample)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from harness.ranks import make_world
from paceline.data.augment import Pipeline, build_pipeline
from paceline.data.dataset import LoadedData
from paceline.data.draws import draw_below, draw_bits, draw_permutation
from paceline.data.loader import Batch, Loader
from paceline.data.order import epoch_order, even_shares, split_train_validation
from paceline.data.registry import load_dataset
from paceline.settings.schema import DataConfig

SEED, EPOCH, BATCH = 5, 3, 24


def test_draws_are_the_published_constants() -> None:
    # Fixed: another value here would silently change every run.
    assert draw_bits(torch.arange(3), 1, 2).tolist() == [
        7646902884856827076,
        -4166906618116523787,
        4002329620749731164,
    ]
    assert draw_permutation(8, 1).tolist() == draw_permutation(8, 1).tolist()


def test_draws_depend_on_every_key_and_are_even() -> None:
    keys = torch.arange(70_000)
    base = draw_bits(keys, 1, 2)
    assert len(base.unique()) == len(base)
    for other in (draw_bits(keys, 2, 1), draw_bits(keys, 1, 3), draw_bits(keys + 1, 1, 2)):
        assert not torch.equal(base, other)
    counts = torch.bincount(draw_below(7, keys, 9))
    assert counts.min() > 9_700
    assert counts.max() < 10_300


def test_each_epoch_has_its_own_permutation() -> None:
    order = epoch_order(1000, SEED, EPOCH)
    assert sorted(order.tolist()) == list(range(1000))
    assert torch.equal(order, epoch_order(1000, SEED, EPOCH))
    assert not torch.equal(order, epoch_order(1000, SEED, EPOCH + 1))
    assert not torch.equal(order, epoch_order(1000, SEED + 1, EPOCH))


@pytest.mark.parametrize(("share", "expected"), [(0.9, 45_000), (0.8, 40_000), (0.5, 25_000)])
def test_split_is_fixed_and_complete(share: float, expected: int) -> None:
    train, validation = split_train_validation(50_000, share)
    assert len(train) == expected
    assert sorted(torch.cat([train, validation]).tolist()) == list(range(50_000))
    assert torch.equal(train, split_train_validation(50_000, share)[0])


@pytest.mark.parametrize(("items", "shares"), [(10, 3), (7, 4), (2, 4), (0, 2), (1000, 7)])
def test_even_shares_cover_everything_once(items: int, shares: int) -> None:
    parts = even_shares(items, shares)
    assert [number for part in parts for number in part] == list(range(items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def global_batches(data: LoadedData, config: DataConfig, world_size: int, first_step: int = 0) -> list[Batch]:
    """The global batches of an epoch, assembled from all ranks."""
    pipeline = build_pipeline(config, data.info, SEED)
    train_ids, _ = split_train_validation(len(data.train), config.train_split)
    loaders = [Loader(data.train, train_ids, pipeline, make_world(r, world_size)) for r in range(world_size)]
    epochs = [
        loader.train_epoch(seed=SEED, epoch=EPOCH, global_batch_size=BATCH, first_step=first_step) for loader in loaders
    ]
    return [
        Batch(
            inputs=torch.cat([part.inputs for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
            ids=torch.cat([part.ids for part in parts]),
            wait_s=0.0,
        )
        for parts in zip(*epochs, strict=True)
    ]


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize("augment", ["none", "light", "imagenet"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_same_pixels_on_any_number_of_ranks(augment: str, world_size: int) -> None:
    config = DataConfig(dataset="shapes", num_samples=120, augment=augment, image_size=64, cutout=6)  # type: ignore[arg-type]
    data = load_dataset(config, SEED)
    assert_same(global_batches(data, config, world_size), global_batches(data, config, 1))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_same_pixels_with_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        picture = torch.randint(0, 256, (20 + number, 30, 3), dtype=torch.uint8, generator=generator)
        path = tmp_path / "train" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.numpy()).save(path)
        if number < 4:
            (tmp_path / "test" / path.parent.name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.numpy()).save(tmp_path / "test" / path.parent.name / path.name)

    def batches(num_workers: int, world_size: int) -> list[Batch]:
        config = DataConfig(
            dataset="folder",
            data_dir=str(tmp_path),
            augment="imagenet",
            image_size=28,
            num_workers=num_workers,
        )
        return global_batches(load_dataset(config, SEED), config, world_size)

    assert_same(batches(workers, 2), batches(0, 1))


def test_an_epoch_can_start_at_any_step() -> None:
    config = DataConfig(dataset="shapes", num_samples=120)
    data = load_dataset(config, SEED)
    assert_same(global_batches(data, config, 2, first_step=3), global_batches(data, config, 1)[3:])


def pipeline(**changes: object) -> Pipeline:
    values: dict[str, object] = {
        "kind": "light",
        "seed": SEED,
        "raw_shape": (3, 32, 32),
        "image_size": 224,
        "flip": True,
        "cutout": 0,
        "mean": (0.0, 0.0, 0.0),
        "std": (1 / 255,) * 3,  # so that inputs are pixel values again
    }
    return Pipeline(**{**values, **changes})  # type: ignore[arg-type]


def test_light_crop_is_a_shift_and_a_flip() -> None:
    samples = torch.randint(1, 256, (200, 3, 32, 32), dtype=torch.uint8)
    ids = torch.arange(200)
    out = pipeline().for_training(samples, ids, EPOCH)
    padded = torch.nn.functional.pad(samples, [4] * 4).float()
    offsets, flips = set(), set()
    for sample, result in zip(padded, out, strict=True):
        matches = [
            (row, column, flip)
            for row in range(9)
            for column in range(9)
            for flip in (False, True)
            if torch.equal(window(sample, row, column, flip), result)
        ]
        assert len(matches) == 1
        offsets.add(matches[0][:2])
        flips.add(matches[0][2])
    assert len(offsets) > 60  # of 81
    assert flips == {False, True}


def window(sample: torch.Tensor, row: int, column: int, flip: bool) -> torch.Tensor:
    part = sample[:, row : row + 32, column : column + 32]
    return part.flip(-1) if flip else part


@pytest.mark.parametrize("kind", ["light", "gentle"])
def test_an_epoch_is_drawn_at_once_or_batch_by_batch(kind: str) -> None:
    """On a GPU all choices of an epoch are drawn together. They must equal those of its batches."""
    pipeline = Pipeline(kind, 7, (3, 32, 32), 224, flip=True, cutout=4, mean=(0.0,) * 3, std=(1.0,) * 3)
    ids, keys = torch.randperm(60).view(5, 12), pipeline.keys_of(3)
    together = pipeline.draw(ids, keys)
    assert together.shape == (5, 5, 12)
    for batch, drawn in zip(ids, together.unbind(-2), strict=True):
        assert torch.equal(drawn, pipeline.draw(batch, keys))


def test_epochs_differ_and_flip_can_be_switched_off() -> None:
    samples = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8)
    ids = torch.arange(50)
    assert not torch.equal(pipeline().for_training(samples, ids, 0), pipeline().for_training(samples, ids, 1))
    symmetric = torch.cat([samples, samples.flip(-1)])
    unflipped = pipeline(flip=False, kind="imagenet", image_size=28).for_training(symmetric, ids.repeat(2), 0)
    assert not torch.equal(unflipped[:50], unflipped[50:])


def test_cutout_erases_one_square() -> None:
    samples = torch.full((40, 3, 32, 32), 200, dtype=torch.uint8)
    out = pipeline(kind="none", cutout=8).for_training(samples, torch.arange(40), 0)
    blank = (out == 0).all(1).flatten(1).sum(1)
    assert blank.max() == 64
    assert blank.min() >= 16  # a square half outside of both edges


def test_evaluation_uses_the_centre_of_the_resized_image() -> None:
    samples = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    out = pipeline(kind="imagenet", image_size=28).for_evaluation(samples)
    assert torch.equal(out, samples[:, :, 2:30, 2:30].float())
    assert pipeline(kind="imagenet", image_size=224).for_evaluation(samples).shape == (4, 3, 224, 224)
