"""CIFAR-100 from torchvision's files: download, layout, damage, and `paceline data check`."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.check import check_known
from paceline.data.known_files import CIFAR100_FOLDER, CIFAR100_MD5, missing_files
from paceline.data.registry import load_dataset
from paceline.data.sources import cifar100
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

COUNTS = {"train": 12, "test": 5}


def config(folder: Path) -> DataConfig:
    return DataConfig(dataset="cifar100", data_dir=str(folder))


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive where the download comes from; a folder beside it has nothing."""
    source = tmp_path / "source"
    source.mkdir()
    for number, (name, count) in enumerate(COUNTS.items()):
        pixels = np.full((count, 3072), number, dtype=np.uint8)
        content = {"fine_labels": [99 - place for place in range(count)], "coarse_labels": [0] * count, "data": pixels}
        (source / name).write_bytes(pickle.dumps(content, protocol=2))
        monkeypatch.setitem(CIFAR100_MD5, name, hashlib.md5((source / name).read_bytes()).hexdigest())
    path = tmp_path / cifar100.ARCHIVE_NAME
    with tarfile.open(path, "w:gz") as tar:
        tar.add(source, CIFAR100_FOLDER)
    monkeypatch.setattr(cifar100, "COUNTS", COUNTS)
    monkeypatch.setattr(cifar100, "ARCHIVE_URL", path.as_uri())
    monkeypatch.setattr(cifar100, "ARCHIVE_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    return path


@pytest.mark.parametrize("given", ["", CIFAR100_FOLDER])
def test_downloaded_read_and_checked(archive: Path, tmp_path: Path, given: str) -> None:
    folder = tmp_path / "data"
    assert missing_files("cifar100", folder) == ["train", "test"]
    data = load_dataset(config(folder / given), 0)
    assert (len(data.train), len(data.test), data.info.num_classes) == (12, 5, 100)
    assert data.train.labels[:3].tolist() == [99, 98, 97]
    assert data.test.read(torch.tensor([4])).unique().tolist() == [1]
    assert missing_files("cifar100", folder) == []
    assert check_known("cifar100", folder).proof == "MD5 of all files agree"


def test_damage_is_found(archive: Path, tmp_path: Path) -> None:
    load_dataset(config(tmp_path), 0)
    victim = tmp_path / CIFAR100_FOLDER / "test"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-40] + bytes(40))
    with pytest.raises(DataError, match="damaged"):
        check_known("cifar100", tmp_path)
    wrong = pickle.loads(whole)
    victim.write_bytes(pickle.dumps({**wrong, "fine_labels": [0, 1, 2, 3, 100]}, protocol=2))
    with pytest.raises(DataError) as caught:
        load_dataset(config(tmp_path), 0)
    assert "label 100 in record 4" in caught.value.screen()


def test_the_classes_are_a_hundred_in_alphabetical_order() -> None:
    assert len(set(cifar100.CLASSES)) == 100
    assert sorted(cifar100.CLASSES) == list(cifar100.CLASSES)
