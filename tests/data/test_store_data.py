"""Archives in a store: copies in a bounded cache, stores that fail, full disks, damaged copies, the order in windows.

The store is fsspec's memory file system. tests/data/test_s3_data.py uses an S3 server.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from harness.archive_files import CLASSES, make_pictures, write_tar, write_webdataset, write_zip
from paceline.cli.main import main
from paceline.data.archives import file_cache
from paceline.data.archives.copies import CopiedFiles
from paceline.data.archives.file_cache import FileCache, Outcome
from paceline.data.archives.opened import open_archives
from paceline.data.dataset import LoadedData
from paceline.data.fingerprint import differences, fingerprint_of
from paceline.data.order import sort_by_windows
from paceline.data.registry import load_dataset
from paceline.data.sampling import sampling_of
from paceline.errors import DataError, UserError
from paceline.settings.schema import DataConfig

URL = "memory://bucket/data"
PARTS = {"train": 12, "test": 2}
SHARDS = 6


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures") / "set", PARTS)


@pytest.fixture(autouse=True)
def store(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PACELINE_STORAGE_PATIENCE_S", "5")
    filesystem = fsspec.filesystem("memory")
    filesystem.put(str(write_webdataset(pictures, tmp_path / "shards", SHARDS)) + "/", "/bucket/data/", recursive=True)
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


def config(cache_gb: float = 1.0, url: str = URL) -> DataConfig:
    return DataConfig(dataset="folder", data_dir=url, image_size=28, num_workers=0, cache_gb=cache_gb)


def folder(path: Path) -> LoadedData:
    return load_dataset(DataConfig(dataset="folder", data_dir=str(path), image_size=28, num_workers=0), 0)


def every(data: LoadedData) -> list[torch.Tensor]:
    return [part.read(torch.arange(len(part))) for _, part in data.parts()]


def require_samples(found: LoadedData, pictures: Path) -> None:
    assert all(torch.equal(*both) for both in zip(every(found), every(folder(pictures)), strict=True))


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "data").glob("*.data"))


def used_bytes(tmp_path: Path) -> int:
    used = 0
    for path in copies(tmp_path):
        with suppress(FileNotFoundError):  # it makes room at this moment
            used += path.stat().st_size
    return used


def test_a_store_gives_the_samples_of_the_folder_and_is_read_once(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_dataset(config(), 0)
    assert fingerprint_of(data) == fingerprint_of(folder(pictures))
    assert len(copies(tmp_path)) == 2 * SHARDS
    monkeypatch.setattr(MemoryFileSystem, "cat_file", None)  # pictures come from copies
    monkeypatch.setattr(MemoryFileSystem, "get_file", None)
    require_samples(data, pictures)
    require_samples(load_dataset(config(), 0), pictures)  # another run


def test_one_archive_in_a_store(pictures: Path, tmp_path: Path, store: Any) -> None:
    store.put_file(str(write_zip(pictures, tmp_path / "all.zip")), "/bucket/zips/all.zip")
    require_samples(load_dataset(config(url="memory://bucket/zips/all.zip"), 0), pictures)
    require_samples(load_dataset(config(url="memory://bucket/zips"), 0), pictures)


def test_a_full_cache_is_no_error(pictures: Path, tmp_path: Path) -> None:
    data = load_dataset(config(cache_gb=0), 0)
    require_samples(data, pictures)
    assert not copies(tmp_path)


def test_a_full_disk_is_no_error(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fired = []

    def full(self: Any, remote: str, local: str, **more: Any) -> None:
        fired.append(remote)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("paceline.data.archives.store_place.StorePlace.fetch", full)
    require_samples(load_dataset(config(), 0), pictures)
    assert fired
    assert not list((tmp_path / "cache" / "data").glob("*data*"))


def test_a_store_that_fails_for_a_while_is_survived(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"cat_file": 5, "get_file": 5}
    for name in left:
        whole = getattr(MemoryFileSystem, name)

        def fail(self: Any, *args: Any, _whole: Any = whole, _name: str = name, **more: Any) -> Any:
            if left[_name]:
                left[_name] -= 1
                raise ConnectionResetError("the connection was lost")
            return _whole(self, *args, **more)

        monkeypatch.setattr(MemoryFileSystem, name, fail)
    require_samples(load_dataset(config(), 0), pictures)
    assert left["get_file"] == 0
    require_samples(load_dataset(config(cache_gb=0), 0), pictures)
    assert left["cat_file"] == 0


def test_a_store_that_does_not_answer_ends_with_its_name(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A picture that cannot be read now is not replaced by grey.
    data = load_dataset(replace(config(cache_gb=0), unreadable=5), 0)
    monkeypatch.setenv("PACELINE_STORAGE_PATIENCE_S", "0.1")

    def fail(self: Any, *args: Any, **more: Any) -> Any:
        raise ConnectionResetError("the connection was lost")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(DataError) as failure:
        data.train.read(torch.tensor([0]))
    assert failure.value.exit_code == 3
    assert "memory://bucket/data/train-" in failure.value.screen()
    assert "the connection was lost" in failure.value.screen()


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_indexing_survives_short_and_lost_answers(
    kind: str, pictures: Path, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for copies, archives are read through a file object."""
    if kind == "zip":
        store.put_file(str(write_zip(pictures, tmp_path / "all.zip")), "/bucket/zips/all.zip")
    answers = {"short": 0, "lost": 0}
    whole = MemoryFileSystem.cat_file

    def cat(self: Any, *args: Any, **more: Any) -> bytes:
        content: bytes = whole(self, *args, **more)
        if answers["lost"] < 4:
            answers["lost"] += 1
            raise ConnectionResetError("the connection was lost")
        if answers["short"] < 3:
            answers["short"] += 1
            return content[: len(content) // 2]
        return content

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    monkeypatch.setattr(MemoryFileSystem, "open", None)
    require_samples(load_dataset(config(0, "memory://bucket/zips" if kind == "zip" else URL), 0), pictures)
    assert answers == {"short": 3, "lost": 4}


def test_a_copy_that_is_cut_is_fetched_again(
    pictures: Path, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cuts = MemoryFileSystem.get_file, list[str]()

    def get(self: Any, remote: str, local: str, **more: Any) -> None:
        whole(self, remote, local, **more)
        if len(cuts) < 2:
            cuts.append(remote)
            Path(local).write_bytes(Path(local).read_bytes()[:-1])

    monkeypatch.setattr(MemoryFileSystem, "get_file", get)
    require_samples(load_dataset(config(), 0), pictures)
    assert len(cuts) == 2
    assert len(copies(tmp_path)) == 2 * SHARDS


def test_wrong_places(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="no archives"):
        load_dataset(config(url="memory://bucket/nothing"), 0)
    with pytest.raises(UserError, match="there is no store"):
        load_dataset(config(url="s4://bucket/data"), 0)
    assert main(["plan", "folder-resnet50", "--data-dir", "memory://bucket/nothing"]) == 3
    assert main(["data", "pack", URL, "packed"]) == 2
    assert main(["data", "check", URL]) == 0
    assert "24 train and 4 test pictures" in capsys.readouterr().out


def test_a_damaged_copy_is_named_and_fetched_again(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = load_dataset(config(), 0)
    for path in copies(tmp_path):
        content = bytearray(path.read_bytes())
        for place in range(0, len(content), 100):
            content[place] ^= 255
        path.write_bytes(bytes(content))
    require_samples(data, pictures)
    assert "memory://bucket/data/train-000000.tar" in caplog.text
    data.train.announce(torch.arange(len(data.train)))  # type: ignore[attr-defined]
    wait_for(lambda: len(copies(tmp_path)) >= SHARDS)
    require_samples(data, pictures)


def test_a_damaged_copy_of_a_zip_file_is_fetched_again(
    pictures: Path, tmp_path: Path, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store.put_file(str(write_zip(pictures, tmp_path / "all.zip")), "/bucket/zips/all.zip")
    data = load_dataset(config(url="memory://bucket/zips"), 0)
    data.train.announce(torch.arange(len(data.train)))  # type: ignore[attr-defined]
    wait_for(lambda: copies(tmp_path))
    (copy,) = copies(tmp_path)
    copy.write_bytes(bytes(copy.stat().st_size))
    require_samples(data, pictures)
    assert "memory://bucket/zips/all.zip in the cache is damaged" in caplog.text
    assert not copies(tmp_path)
    # A damaged origin is no reason to fetch it again and again.
    data.train.announce(torch.arange(len(data.train)))  # type: ignore[attr-defined]
    wait_for(lambda: copies(tmp_path))
    (copy,) = copies(tmp_path)
    copy.write_bytes(bytes(copy.stat().st_size))
    store.pipe_file("/bucket/zips/all.zip", bytes(copy.stat().st_size))
    with pytest.raises(DataError, match="cannot be read"):
        data.train.read(torch.arange(1))
    assert copies(tmp_path) == [copy]


def wait_for(is_true: Any) -> None:
    change = threading.Event()
    for _ in range(1000):
        if is_true():
            return
        change.wait(0.01)
    raise AssertionError("it did not happen within 10 s")


def test_a_changed_archive_is_another_file(pictures: Path, tmp_path: Path, store: Any) -> None:
    load_dataset(config(), 0)
    (first, content), *_ = sorted((path.name, path.read_bytes()) for path in (pictures / "train" / "ant").iterdir())
    new = write_tar(tmp_path / "new.tar", [(first, content), (f"{first.partition('.')[0]}.cls", b"1")])
    store.put_file(str(new), "/bucket/data/train-000000.tar")
    assert len(load_dataset(config(), 0).train) == 21


# --- The cache


def test_a_file_that_only_another_user_can_read_is_replaced(tmp_path: Path) -> None:
    cache, key = FileCache(tmp_path / "copies", 250), f"{0:032x}"

    def add(content: bytes) -> Outcome:
        return cache.add(key, len(content), lambda path: path.write_bytes(content), own=[key], keep=())

    assert add(b"before") == Outcome.KEPT
    path = tmp_path / "copies" / f"{key}.data"
    path.chmod(0)  # as another user's file with umask 077
    if os.access(path, os.R_OK):
        pytest.skip("root can read every file")
    assert cache.read(key, 0, 6) is None
    assert not cache.holds(key)
    assert add(b"after") == Outcome.KEPT
    assert cache.read(key, 0, 5) == b"after"


def test_the_cache_is_bounded_and_keeps_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path / "copies", 250)
    keys = [f"{number:032x}" for number in range(6)]

    def add(number: int, own: list[int], keep: list[int]) -> Outcome:
        def write(path: Path) -> None:
            path.write_bytes(b"x" * 100)
            os.utime(path, (number, number))

        return cache.add(keys[number], 100, write, own=[keys[n] for n in own], keep=[keys[n] for n in keep])

    assert [add(number, [0, 1], [0, 1]) for number in (0, 1)] == [Outcome.KEPT] * 2
    assert add(2, [0, 1, 2], [0, 1]) == Outcome.FULL
    assert add(2, [0, 1, 2], [1]) == Outcome.KEPT  # removes 0
    assert [cache.holds(key) for key in keys[:3]] == [False, True, True]
    assert add(3, [3], [3]) == Outcome.FULL  # others used theirs lately
    monkeypatch.setattr(file_cache, "_USED_LATELY_S", -1.0)
    assert add(3, [3], [3]) == Outcome.KEPT
    assert sum(path.stat().st_size for path in (tmp_path / "copies").glob("*.data")) <= 250


def test_a_cache_whose_disk_fails_is_no_error(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_dataset(config(), 0)

    def fail(*of: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file_cache, "read_at", fail)
    require_samples(data, pictures)
    assert len(copies(tmp_path)) == 2  # of files without pictures


def test_a_cache_that_is_deleted_is_no_error(pictures: Path, tmp_path: Path) -> None:
    cache, keys = FileCache(tmp_path / "copies", 250), [f"{number:032x}" for number in range(2)]

    def add(key: str, *, deletes: bool) -> Outcome:
        def write(path: Path) -> None:
            path.write_bytes(b"x")
            if deletes:
                shutil.rmtree(tmp_path / "copies")

        return cache.add(key, 1, write, own=keys, keep=())

    assert add(keys[0], deletes=True) == Outcome.FULL
    assert add(keys[1], deletes=False) == Outcome.KEPT
    data = load_dataset(config(), 0)
    shutil.rmtree(tmp_path / "cache")
    require_samples(data, pictures)


def test_files_that_are_being_written_count(tmp_path: Path) -> None:
    """Fetching starts with an empty file, and its size grows. A third file must not fit beside two of them."""
    cache, keys = FileCache(tmp_path / "copies", 250), [f"{number:08x}" for number in range(3)]
    outcomes: list[Outcome] = []

    def add(number: int) -> None:
        def write(path: Path) -> None:
            with path.open("wb") as file:  # as a store writes it: empty at first
                if number < 2:
                    add(number + 1)
                file.write(b"x" * 100)

        outcomes.append(cache.add(keys[number], 100, write, own=keys, keep=()))

    add(0)
    assert outcomes == [Outcome.FULL, Outcome.KEPT, Outcome.KEPT]  # the last one asks first


def test_a_file_that_is_renamed_during_a_count_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is listed while a file gets its name shows neither of both names."""
    cache, keys = FileCache(tmp_path / "copies", 250), [f"{number:08x}" for number in range(3)]
    may_finish, is_finished = threading.Event(), threading.Event()
    fired: list[bool] = []

    def fill(path: Path) -> None:
        path.write_bytes(b"x" * 100)

    def first(path: Path) -> None:
        fill(path)
        assert may_finish.wait(60)

    def list_while_it_is_renamed(folder: Path) -> list[os.DirEntry[str]]:
        found = list(os.scandir(folder))
        if threading.current_thread() is threading.main_thread() and not fired:
            fired.append(True)
            may_finish.set()
            is_finished.wait(0.3)  # the rename has to wait for the count
        return found

    def add_first() -> None:
        cache.add(keys[0], 100, first, own=keys, keep=keys)
        is_finished.set()

    assert cache.add(keys[1], 100, fill, own=keys, keep=keys) == Outcome.KEPT
    other = threading.Thread(target=add_first)
    monkeypatch.setattr(FileCache, "holds", lambda self, key: False)
    other.start()
    while not list((tmp_path / "copies").glob(f".{keys[0]}.data*draft")):
        pass
    monkeypatch.setattr(file_cache, "os", SimpleNamespace(**{**vars(os), "scandir": list_while_it_is_renamed}))
    assert cache.add(keys[2], 100, fill, own=keys, keep=keys) == Outcome.FULL
    other.join()
    assert fired


def test_a_killed_process_leaves_no_file_that_is_used(tmp_path: Path) -> None:
    """Its part of a file is removed later."""
    cache, key = FileCache(tmp_path / "copies", 1000), "0" * 32
    code = f"""
import os
from pathlib import Path
from paceline.data.archives.file_cache import FileCache
def write(path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), 9)
FileCache(Path({str(tmp_path / "copies")!r}), 1000).add({key!r}, 100, write, own=(), keep=())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert not cache.holds(key)
    assert list((tmp_path / "copies").glob(".*draft"))
    assert cache.add(key, 5, lambda path: path.write_bytes(b"whole"), own=(), keep=()) == Outcome.KEPT
    assert [path.read_bytes() for path in (tmp_path / "copies").glob("*.data")] == [b"whole"]
    assert not list((tmp_path / "copies").glob(".*draft"))


def test_two_processes_write_a_file_once(tmp_path: Path) -> None:
    cache, key = FileCache(tmp_path / "copies", 1000), "0" * 32
    outcomes: list[Outcome] = []

    def write(path: Path) -> None:
        other = threading.Thread(
            target=lambda: outcomes.append(FileCache(tmp_path / "copies", 1000).add(key, 5, fail, own=(), keep=()))
        )
        other.start()
        other.join()
        path.write_bytes(b"whole")

    def fail(path: Path) -> None:
        raise AssertionError("written twice")

    assert cache.add(key, 5, write, own=(), keep=()) == Outcome.KEPT
    assert outcomes == [Outcome.BUSY]
    assert cache.add(key, 5, fail, own=(), keep=()) == Outcome.KEPT


# --- The order in windows


def test_windows_are_a_pure_function_and_cover_every_sample_once() -> None:
    blocks = torch.arange(100) % 10
    order = sort_by_windows(blocks, 3, seed=1, epoch=2)
    assert torch.equal(order.sort().values, torch.arange(100))
    assert torch.equal(order, sort_by_windows(blocks, 3, seed=1, epoch=2))
    assert not torch.equal(order, sort_by_windows(blocks, 3, seed=1, epoch=3))
    windows = [set(blocks[part].tolist()) for part in order.split(30)]
    assert [len(window) for window in windows] == [3, 3, 3, 1]
    assert set().union(*windows) == set(range(10))


def test_data_that_exceed_the_cache_are_read_in_windows(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [file.size_bytes for file in open_archives(config()).catalog.files if file.name.startswith("train")]
    cache_gb = 4.5 * max(sizes) / 1e9
    for path in copies(tmp_path):
        path.unlink()
    data, plain = load_dataset(config(cache_gb), 0), folder(pictures)
    assert (
        "shuffled over all samples then, over 2 of 6 data files" in differences(*map(fingerprint_of, (plain, data)))[0]
    )
    sampling = sampling_of(config(cache_gb), data.train, torch.arange(24))
    order = sampling.batches(torch.arange(24), seed=0, epoch=0, global_batch_size=4).flatten()
    assert torch.equal(order.sort().values, torch.arange(24))
    data.train.announce(order)  # type: ignore[attr-defined]
    limit_bytes = round(cache_gb * 1e9)
    for ids in order.split(4):
        assert torch.equal(data.train.read(ids), plain.train.read(ids))
        assert used_bytes(tmp_path) <= limit_bytes
    flags = ["--data-dir", URL, "--cache-gb", str(cache_gb), "--image-size", "28", "--global-batch-size", "4"]
    assert main(["plan", "folder-resnet50", *flags]) == 0
    shown = capsys.readouterr().out
    assert "in windows of 2 of 6 data files" in shown
    assert f"33.3% of the samples (a file has {len(CLASSES)} of 2 classes)" in shown


def test_files_are_fetched_in_the_order_of_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_dataset(config(), 0)
    for path in copies(tmp_path):
        path.unlink()
    fetched: list[str] = []
    whole = CopiedFiles._write_copy

    def noted(self: Any, file: Any, draft: Path) -> None:
        fetched.append(file.name)
        whole(self, file, draft)

    monkeypatch.setattr(CopiedFiles, "_write_copy", noted)
    monkeypatch.setattr("paceline.data.archives.copies._FETCHING", 1)
    order = torch.arange(len(data.train)).flip(0)
    opened = open_archives(config())
    files = [opened.catalog.files[number].name for number in opened.catalog.parts["train"].columns["files"]]
    data.train.announce(order)  # type: ignore[attr-defined]
    wait_for(lambda: len(copies(tmp_path)) == SHARDS)
    assert fetched == list(dict.fromkeys(files[index] for index in order.tolist()))
