"""The shapes data set: a pure function of the seed, balanced, fast to make, and neither trivial nor too hard."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.registry import describe_dataset, load_dataset
from paceline.data.sources.shapes import CLASSES, MEAN, STD, make_shapes
from paceline.settings.schema import DataConfig

LINEAR_CEILING = 0.50


def test_same_seed_same_bytes() -> None:
    images, labels = make_shapes(500, 7, stream=0)
    again, labels_again = make_shapes(500, 7, stream=0)
    assert torch.equal(images, again)
    assert torch.equal(labels, labels_again)


@pytest.mark.parametrize(("seed", "stream"), [(8, 0), (7, 1)])
def test_other_seeds_and_streams_share_no_picture(seed: int, stream: int) -> None:
    first, _ = make_shapes(400, 7, stream=0)
    other, _ = make_shapes(400, seed, stream=stream)
    pictures = {image.numpy().tobytes() for image in first}
    assert len(pictures) == 400
    assert pictures.isdisjoint(image.numpy().tobytes() for image in other)


def test_balance_order_type_and_range() -> None:
    images, labels = make_shapes(1003, 1, stream=0)
    assert images.shape == (1003, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [101] * 3 + [100] * 7
    assert labels[:50].unique().numel() > 5
    assert images.min() < 10
    assert images.max() > 245


def test_few_samples() -> None:
    images, labels = make_shapes(3, 1, stream=0)
    assert len(images) == len(labels) == 3


def test_constants_describe_the_pictures() -> None:
    images, _ = make_shapes(2000, 3, stream=0)
    pixels = images.float() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(MEAN), atol=0.02, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(STD), atol=0.02, rtol=0)


def test_the_middle_of_a_shape_differs_from_the_background() -> None:
    images, labels = make_shapes(2000, 3, stream=0)
    discs = images[labels == CLASSES.index("disc")].float().mean(1)
    assert (discs.amax((1, 2)) - discs.median(2).values.median(1).values > 20).all()


def test_described_as_loaded() -> None:
    config = DataConfig(dataset="shapes", num_samples=300)
    info, data = describe_dataset(config, 5), load_dataset(config, 5)
    assert data.info == info
    assert (len(data.train), len(data.test)) == (300, 1000) == (info.num_train, info.num_test)
    assert describe_dataset(DataConfig(num_samples=50_000), 5).num_test == 5000
    assert tuple(data.test.read(torch.tensor([0])).shape[1:]) == info.sample_shape


def test_the_data_set_is_fast_to_make() -> None:
    start = time.process_time()
    make_shapes(5000, 0, stream=0)
    # A quarter of the default set: about 0.3 s on an idle core. The rest is a margin for busy machines.
    assert time.process_time() - start < 2.0


def normalised(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN[0]) / STD[0]


def augmented(images: Tensor) -> Tensor:
    """Shifted by up to four pixels and mirrored, one draw per batch."""
    down, across = torch.randint(0, 9, (2,)).tolist()
    shifted = F.pad(images, (4, 4, 4, 4))[:, :, down : down + 32, across : across + 32]
    return shifted.flip(3) if torch.rand(()) < 0.5 else shifted


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        right = [
            (model(normalised(x)).argmax(1) == y) for x, y in zip(images.split(500), labels.split(500), strict=True)
        ]
    return torch.cat(right).float().mean().item()


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float) -> None:
    steps = epochs * (len(images) // 256)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(images))[: len(images) // 256 * 256].split(256):
            optimizer.zero_grad()
            F.cross_entropy(model(augmented(normalised(images[batch]))), labels[batch]).backward()
            optimizer.step()
            schedule.step()


@pytest.fixture(scope="module")
def train_and_test() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return make_shapes(18_000, 42, stream=0), make_shapes(2000, 42, stream=1)


# A small CNN learns them with the first recipe: tests/training/test_whole_runs.py.
@pytest.mark.slow
def test_a_linear_model_fails(train_and_test: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
        train(linear, *train_and_test[0], epochs=5, lr=0.002)
    assert accuracy(linear, *train_and_test[1]) < LINEAR_CEILING
