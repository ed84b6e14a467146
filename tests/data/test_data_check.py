"""`paceline data check` of the named data sets compares every byte that it can, and downloads nothing."""

from __future__ import annotations

import gzip
import hashlib
import struct
import tarfile
from pathlib import Path

import pytest

from harness.task_data import write_pictures
from paceline.data.check import check_known, check_tables
from paceline.data.known_files import FASHION_MNIST_MD5
from paceline.data.parts import has_tables
from paceline.data.sources import cifar10, fashion_mnist
from paceline.errors import DataError


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set and the archive it came from."""
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", 10)
    folder = tmp_path / cifar10.FOLDER
    folder.mkdir()
    for number, name in enumerate(cifar10.FILES):
        (folder / name).write_bytes(b"".join(bytes([label]) + bytes([number]) * 3072 for label in range(10)))
    archive = tmp_path / cifar10.ARCHIVE_NAME
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, cifar10.FOLDER)
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    return tmp_path


def change(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def test_cifar10_is_compared_with_its_archive(cifar: Path) -> None:
    assert "every byte" in check_known("cifar10", cifar).proof
    change(cifar / cifar10.FOLDER / "data_batch_3.bin", 777)  # a pixel: sizes and labels do not show it
    with pytest.raises(DataError, match="damaged") as failure:
        check_known("cifar10", cifar)
    assert "data_batch_3.bin" in failure.value.screen()
    (cifar / cifar10.ARCHIVE_NAME).unlink()
    assert "cannot be compared" in check_known("cifar10", cifar).proof


def test_a_damaged_archive_is_named(cifar: Path) -> None:
    change(cifar / cifar10.ARCHIVE_NAME, 100)
    with pytest.raises(DataError, match="damaged") as failure:
        check_known("cifar10", cifar)
    assert cifar10.ARCHIVE_NAME in failure.value.screen()


def test_missing_files_are_not_downloaded(cifar: Path) -> None:
    (cifar / cifar10.FOLDER / "test_batch.bin").unlink()
    with pytest.raises(DataError, match="not there") as failure:
        check_known("cifar10", cifar)
    assert "test_batch.bin" in failure.value.screen()
    assert not (cifar / cifar10.FOLDER / "test_batch.bin").exists()


def test_fashion_mnist_is_compared_with_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"train": 6, "t10k": 4}
    monkeypatch.setattr(fashion_mnist, "COUNTS", counts)
    folder = tmp_path / fashion_mnist.FOLDER
    folder.mkdir()
    for prefix, count in counts.items():
        for name, dimensions in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            header = struct.pack(f">BBBB{len(dimensions)}I", 0, 0, 8, len(dimensions), *dimensions)
            body = bytes(count * (784 if len(dimensions) == 3 else 1))
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(header + body, mtime=0))
    sums = {path.stem: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    for name, md5 in sums.items():
        monkeypatch.setitem(FASHION_MNIST_MD5, name, md5)
    assert check_known("fashion-mnist", tmp_path).proof == "MD5 of all files agree"
    victim = folder / "train-images-idx3-ubyte.gz"
    change(victim, 5)  # the time in its header: the unpacked pictures are the same
    with pytest.raises(DataError, match="damaged") as failure:
        check_known("fashion-mnist", tmp_path)
    assert victim.name in failure.value.screen()
    (folder / victim.stem).write_bytes(gzip.decompress(victim.read_bytes()))
    assert "MD5 is known" in check_known("fashion-mnist", tmp_path).proof


class NoProgress:
    def start(self, total: int, done: int) -> None:
        pass

    def advance(self, by: int) -> None:
        pass


def test_tables_are_checked_with_their_pictures_and_labels(tmp_path: Path) -> None:
    rows = {"train.csv": [("a.png", "x;y"), ("b.png", ""), ("same.png", "y")], "test.csv": [("c.png", "x")]}
    write_pictures(tmp_path, rows)
    (tmp_path / "c.png").write_bytes((tmp_path / "same.png").read_bytes())
    assert has_tables(tmp_path)
    found = check_tables(tmp_path, 1, NoProgress())
    assert found.unreadable is None
    text = "\n".join(found.lines)
    assert "train.csv: 3 pictures" in text
    assert "2 classes, 0 to 2 per picture: --task multi-label" in text
    assert "2 (the same picture in several parts" in text
    (tmp_path / "b.png").write_bytes(b"no picture")
    damaged = check_tables(tmp_path, 1, NoProgress()).unreadable
    assert damaged is not None
    assert "b.png" in damaged.screen()
    write_pictures(tmp_path, {"train.csv": [("a.png", "1.5"), ("b.png", "2")], "test.csv": [("c.png", "9")]})
    (labels,) = [line for line in check_tables(tmp_path, 1, NoProgress()).lines if line.startswith("labels")]
    assert "numbers from 1.5 to 9: --task regression" in labels
    (tmp_path / "train.csv").write_text("name,age\n")  # another table: this is a folder of pictures
    assert not has_tables(tmp_path)
