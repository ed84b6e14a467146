"""Fashion-MNIST: IDX files are parsed strictly, found in both layouts, and fetched if missing."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from paceline.data.registry import describe_dataset, load_dataset
from paceline.data.sources import fashion_mnist
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

COUNTS = {"train": 6, "t10k": 4}


def config(data_dir: Path) -> DataConfig:
    return DataConfig(dataset="fashion-mnist", data_dir=str(data_dir))


def idx(body: bytes, *dims: int) -> bytes:
    return struct.pack(f">BBBB{len(dims)}I", 0, 0, 8, len(dims), *dims) + body


def files() -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for prefix, count in COUNTS.items():
        pixels = b"".join(bytes([i]) * 784 for i in range(count))
        made[f"{prefix}-images-idx3-ubyte"] = idx(pixels, count, 28, 28)
        made[f"{prefix}-labels-idx1-ubyte"] = idx(bytes(range(count)), count)
    return made


def write(folder: Path, contents: dict[str, bytes], zipped: bool) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion_mnist, "COUNTS", COUNTS)


def test_described_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    info = describe_dataset(config(tmp_path), 0)
    assert (info.num_train, info.num_test, info.num_classes) == (60_000, 10_000, 10)
    assert info.sample_shape == (1, 28, 28)


@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_both_layouts_plain_and_zipped(tmp_path: Path, folder: str, zipped: bool) -> None:
    write(tmp_path / folder, files(), zipped)
    data = load_dataset(config(tmp_path), 0)
    assert data.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    batch = data.test.read(torch.tensor([3, 0]))
    assert batch.shape == (2, 1, 28, 28)
    assert batch.amax((1, 2, 3)).tolist() == [3, 0]


FAULTS = {
    "empty": ("train-images-idx3-ubyte", b"", "begins nowhere"),
    "magic": ("train-images-idx3-ubyte", b"\x00\x00\x0d\x03" + bytes(5000), "00 00 0d 03"),
    "header cut": ("train-images-idx3-ubyte", b"\x00\x00\x08\x03\x00", "begins 00 00 08 03"),
    "rank": ("train-labels-idx1-ubyte", idx(bytes(6), 6, 1), "00 00 08 02"),
    "dimensions": ("train-images-idx3-ubyte", idx(bytes(6 * 32 * 32), 6, 32, 32), "(6, 32, 32)"),
    "short": ("t10k-images-idx3-ubyte", idx(bytes(4 * 784 - 1), 4, 28, 28), "3,151 bytes"),
    "long": ("t10k-labels-idx1-ubyte", idx(bytes(5), 4), "13 bytes"),
    "label": ("t10k-labels-idx1-ubyte", idx(bytes([0, 1, 2, 10]), 4), "label 10"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    name, content, got = FAULTS[fault]
    write(tmp_path / "fashion-mnist", files() | {name: content}, zipped=False)
    with pytest.raises(DataError) as caught:
        load_dataset(config(tmp_path), 0)
    screen = caught.value.screen()
    assert name in screen
    assert got in screen
    assert "delete it" in screen


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(bytes(1000))[:-6]], ids=["not gzip", "torn"])
def test_damaged_gzip_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "fashion-mnist", files(), zipped=True)
    (tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        load_dataset(config(tmp_path), 0)


def test_without_network_the_message_names_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fashion_mnist, "BASE_URL", "http://127.0.0.1:1/")
    with pytest.raises(DataError) as caught:
        load_dataset(config(tmp_path), 0)
    assert str(tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz") in caught.value.screen()
