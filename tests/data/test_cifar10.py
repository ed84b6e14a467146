"""CIFAR-10: the binary layout is read strictly. Missing files are fetched and unpacked, or explained."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.shared_data import real_cifar10
from paceline.data.registry import describe_dataset, load_dataset
from paceline.data.sources import cifar10
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

RECORDS = 20


def config(data_dir: Path) -> DataConfig:
    return DataConfig(dataset="cifar10", data_dir=str(data_dir))


def records(number: int, count: int = RECORDS) -> bytes:
    """Record i of file `number` has label i % 10, and every pixel byte is `number`."""
    return b"".join(bytes([i % 10]) + bytes([number]) * 3072 for i in range(count))


def write_files(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(cifar10.FILES, start=1):
        (folder / name).write_bytes(records(number))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", RECORDS)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(cifar10, "ARCHIVE_URL", "http://127.0.0.1:1/cifar-10-binary.tar.gz")


def make_archive(path: Path, skip: str = "", extra: tuple[str, ...] = ()) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate((*cifar10.FILES, *extra), start=1):
            if name != skip:
                member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
                member.size = len(records(number))
                tar.addfile(member, io.BytesIO(records(number)))


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None) -> Iterator[Path]:
    """An archive on a local server. Yields the served folder."""
    site = tmp_path / "site"
    site.mkdir()
    make_archive(site / "c.tar.gz", extra=("../../escape", "readme.html"))
    handler = functools.partial(QuietHandler, directory=str(site))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(cifar10, "ARCHIVE_URL", f"http://127.0.0.1:{httpd.server_port}/c.tar.gz")
        monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5((site / "c.tar.gz").read_bytes()).hexdigest())
        yield site
        httpd.shutdown()
        thread.join()


def test_described_without_files(tmp_path: Path) -> None:
    info = describe_dataset(config(tmp_path / "absent"), 0)
    assert (info.num_train, info.num_test, info.num_classes) == (50_000, 10_000, 10)
    assert info.sample_shape == (3, 32, 32)


def test_official_size(tmp_path: Path) -> None:
    for name in cifar10.FILES:  # sparse zeros: label 0, black pixels
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 10_000 * 3073)
    data = load_dataset(config(tmp_path), 0)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert data.train.read(torch.tensor([0, 49_999])).shape == (2, 3, 32, 32)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("given", ["", cifar10.FOLDER])
def test_layout(tmp_path: Path, given: str) -> None:
    write_files(tmp_path / cifar10.FOLDER)
    data = load_dataset(config(tmp_path / given), 0)
    assert data.train.labels[:12].tolist() == [*range(10), 0, 1]
    assert data.train.read(torch.tensor([0, RECORDS, 5 * RECORDS - 1])).amax((1, 2, 3)).tolist() == [1, 2, 5]
    assert data.test.read(torch.tensor([3])).unique().tolist() == [6]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("content", "got"),
    [(records(3)[:-1], "61,459 bytes"), (b"", "0 bytes"), (b"\x0a" + records(3)[1:], "label 10 in record 0")],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, got: str) -> None:
    write_files(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_dataset(config(tmp_path), 0)
    screen = caught.value.screen()
    assert "data_batch_3.bin" in screen
    assert got in screen
    assert "delete it" in screen


def test_fetched_and_unpacked(served: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "new" / "data"
    data = load_dataset(config(data_dir), 0)
    assert len(data.train) == 5 * RECORDS
    assert sorted(p.name for p in (data_dir / cifar10.FOLDER).iterdir()) == sorted(cifar10.FILES)
    assert not list(tmp_path.rglob("escape"))
    assert not list(data_dir.glob(".unpack*"))


def test_a_deleted_file_is_restored_without_the_network(served: Path, tmp_path: Path) -> None:
    load_dataset(config(tmp_path), 0)
    (served / "c.tar.gz").unlink()
    (tmp_path / cifar10.FOLDER / "test_batch.bin").unlink()
    assert len(load_dataset(config(tmp_path), 0).test) == RECORDS


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fault", ["not a tar", "member missing", "member short", "cut off"])
def test_a_bad_archive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    archive = tmp_path / cifar10.ARCHIVE_NAME
    make_archive(archive, skip="data_batch_2.bin" if fault == "member missing" else "")
    if fault == "not a tar":
        archive.write_bytes(b"<html>sign in</html>")
    elif fault == "cut off":
        archive.write_bytes(archive.read_bytes()[:200])
    elif fault == "member short":
        monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", RECORDS + 1)
    with pytest.raises(DataError) as caught:
        load_dataset(config(tmp_path), 0)
    assert str(archive) in caught.value.screen()
    assert not (tmp_path / cifar10.FOLDER).exists()


@pytest.mark.usefixtures("no_network")
def test_without_network_the_message_names_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(config(tmp_path), 0)
    screen = caught.value.screen()
    assert cifar10.ARCHIVE_URL in screen
    assert str(tmp_path / cifar10.ARCHIVE_NAME) in screen


@pytest.mark.shared
def test_the_real_data() -> None:
    data = load_dataset(config(real_cifar10()), 0)
    assert data.train.labels.bincount().tolist() == [5000] * 10
    assert data.test.labels.bincount().tolist() == [1000] * 10
    pixels = data.train.read(torch.arange(0, 50_000, 10)).float() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(cifar10.MEAN), atol=0.01, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(cifar10.STD), atol=0.01, rtol=0)
