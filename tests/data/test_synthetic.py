"""Synthetic data, and the early checks of the data flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.data.registry import (
    check_data_config,
    check_dataset_name,
    describe_dataset,
    load_dataset,
    parse_input_size,
)
from paceline.data.sources.synthetic import TEST_STREAM, TRAIN_STREAM, make_synthetic
from paceline.errors import UserError
from paceline.settings.schema import DataConfig


def config(**values: object) -> DataConfig:
    return DataConfig(**{"dataset": "synthetic", "num_samples": 2000, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "shape"), [("784", (784,)), ("3x32x32", (3, 32, 32)), ("1x28x28", (1, 28, 28))])
def test_input_sizes(text: str, shape: tuple[int, ...]) -> None:
    assert parse_input_size(text) == shape


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-5",
        "3x",
        "x3",
        "abc",
        "",
        " 784",
        "3x32",
        "1x2x3x4",
        "3x0x32",
        "3.5",
        "2x8x8",
        "٣",
        "9" * 40,
        "1_0",
    ],
)
def test_malformed_input_sizes(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_input_size(text)
    assert "3x32x32" in caught.value.screen()


@pytest.mark.parametrize("size", ["3x4096x4096", "999999999", "3x224x224"])
def test_absurd_sizes_are_refused_before_any_work(size: str) -> None:
    with pytest.raises(UserError, match="too large"):
        check_data_config(config(input_size=size))


@pytest.mark.parametrize("num_samples", [2**31, 2**62])
def test_absurd_numbers_of_shapes_are_refused_before_any_work(num_samples: int) -> None:
    """In the check at the start, and in an evaluation, whose config is from a checkpoint."""
    for check in (check_data_config, lambda absurd: describe_dataset(absurd, 0)):
        with pytest.raises(UserError, match="too large"):
            check(config(dataset="shapes", num_samples=num_samples))


def test_checking_imports_no_torch() -> None:
    code = "import sys, paceline.data.registry; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "meant"), [("shape", "shapes"), ("CIFAR10", "cifar10"), ("fashion_mnist", "fashion-mnist")]
)
def test_unknown_names_get_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        check_dataset_name(name)
    assert f"did you mean '{meant}'" in caught.value.screen()
    assert "folder" in caught.value.screen()


def test_a_missing_folder_is_reported_early(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        check_data_config(DataConfig(dataset="folder", data_dir=str(tmp_path / "absent")))


@pytest.mark.parametrize(("size", "dtype"), [("20", torch.float32), ("3x32x32", torch.uint8), ("1x28x28", torch.uint8)])
def test_shape_type_and_balance(size: str, dtype: torch.dtype) -> None:
    wanted = config(input_size=size, num_classes=7)
    info, data = describe_dataset(wanted, 1), load_dataset(wanted, 1)
    assert data.info == info
    assert (len(data.train), len(data.test)) == (info.num_train, info.num_test) == (2000, 1000)
    batch = data.train.read(torch.tensor([5, 1, 5]))
    assert batch.shape == (3, *info.sample_shape)
    assert batch.dtype == dtype
    counts = data.train.labels.bincount(minlength=7)
    assert counts.max() - counts.min() <= 1
    assert len(info.mean) == len(info.std) == (info.sample_shape[0] if info.is_image else 0)


def test_the_constants_describe_the_images() -> None:
    wanted = config(input_size="3x32x32")
    info, data = describe_dataset(wanted, 3), load_dataset(wanted, 3)
    pixels = data.train.read(torch.arange(2000)).float() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(info.mean), atol=0.05, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(info.std), atol=0.03, rtol=0)


@pytest.mark.parametrize("shape", [(12,), (3, 8, 5)])
def test_a_pure_function_of_seed_and_stream(shape: tuple[int, ...]) -> None:
    first, again = (make_synthetic(300, shape, 10, 5, stream=TRAIN_STREAM) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], make_synthetic(300, shape, 10, 6, stream=TRAIN_STREAM)[0])
    assert not torch.equal(first[0], make_synthetic(300, shape, 10, 5, stream=TEST_STREAM)[0])


def test_an_mlp_learns_it_but_not_perfectly() -> None:
    samples, labels = make_synthetic(16_000, (784,), 10, 42, stream=TRAIN_STREAM)
    test_samples, test_labels = make_synthetic(2000, (784,), 10, 42, stream=TEST_STREAM)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(mlp.parameters(), 1e-3)
        for batch in torch.randperm(16_000).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(mlp(samples[batch]), labels[batch]).backward()
            optimizer.step()
    accuracy = (mlp(test_samples).argmax(1) == test_labels).float().mean().item()
    assert 0.90 < accuracy < 0.985
