"""CIFAR-10 from its official binary files, fetched when absent.

The binary layout is one label byte and 3072 pixel bytes per record, so its size proves its wholeness and
reading it is one reshape. The pickled "python version" is never opened: unpickling executes whatever
the file says.
"""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.schema import DataConfig
from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.fetch import fetch_file, locked
from paceline.errors import DataError

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE_NAME = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
PICKLED_FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)

RECORDS_PER_FILE = 10_000
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return DatasetInfo(
        name="cifar10",
        num_train=RECORDS_PER_FILE * len(TRAIN_FILES),
        num_test=RECORDS_PER_FILE,
        classes=CLASSES,
        sample_shape=SHAPE,
        mean=MEAN,
        std=STD,
    )


def load(config: DataConfig, seed: int) -> LoadedData:
    folder = _folder(Path(config.data_dir))
    if _missing(folder):
        _fetch(folder)
    train = _read([folder / name for name in TRAIN_FILES])
    test = _read([folder / TEST_FILE])
    return LoadedData(describe(config, seed), train, test)


def _folder(data_dir: Path) -> Path:
    """`data_dir` may be the folder of the batches or the folder above it."""
    is_itself = data_dir.name == FOLDER or any((data_dir / name).exists() for name in FILES)
    return data_dir if is_itself else data_dir / FOLDER


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if not (folder / name).exists()]


def _fetch(folder: Path) -> None:
    """Put the missing files in place. Each appears whole, so a reader that sees all six may read."""
    try:
        with locked(folder):
            if missing := _missing(folder):
                archive = fetch_file(
                    ARCHIVE_URL,
                    folder.parent / ARCHIVE_NAME,
                    checksum=ARCHIVE_MD5,
                    algorithm="md5",
                    what="CIFAR-10",
                )
                _unpack(archive, folder, missing)
    except DataError as error:
        if pickled := _pickled(folder):
            raise _needs_binary(pickled, error) from error
        raise
    except OSError as error:
        raise DataError("could not put CIFAR-10 in place", where=str(folder), got=error) from error


def _unpack(archive: Path, folder: Path, wanted: list[str]) -> None:
    """Extract just the wanted members into a temporary folder, then move them into place."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder.parent) as name:
        try:
            with tarfile.open(archive) as tar:
                for file in wanted:
                    tar.extract(_member(tar, file), name, filter="data")
        except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error) as error:
            raise DataError(
                "this archive cannot be unpacked",
                where=str(archive),
                got=str(error) or type(error).__name__,
                hint="delete it and it will be downloaded again",
            ) from error
        folder.mkdir(exist_ok=True)
        for file in wanted:
            (Path(name) / FOLDER / file).replace(folder / file)


def _member(tar: tarfile.TarFile, file: str) -> tarfile.TarInfo:
    member = tar.getmember(f"{FOLDER}/{file}")
    expected = RECORDS_PER_FILE * RECORD_BYTES
    if not member.isfile() or member.size != expected:
        raise tarfile.TarError(f"{member.name} is no file of {expected} bytes")
    return member


def _pickled(folder: Path) -> Path | None:
    beside = folder.parent / PICKLED_FOLDER
    if beside.is_dir():
        return beside
    return folder.parent if (folder.parent / "data_batch_1").exists() else None


def _needs_binary(pickled: Path, error: DataError) -> DataError:
    return DataError(
        "the binary version of CIFAR-10 is needed, not the pickled one",
        where=str(pickled),
        got=f"Python pickles, which execute code when opened; and {error.what}: {error.got}",
        allowed=f"a folder {FOLDER} with {', '.join(FILES)}",
        hint=f"get {ARCHIVE_URL}\n{error.hint}" if error.where == ARCHIVE_URL else error.hint,
    )


def _read(paths: list[Path]) -> ResidentDataset:
    records = np.concatenate([_records(path) for path in paths])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *SHAPE)
    return ResidentDataset(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)))


def _records(path: Path) -> NDArray[np.uint8]:
    expected = RECORDS_PER_FILE * RECORD_BYTES
    try:
        size = path.stat().st_size
        records = np.fromfile(path, dtype=np.uint8) if size == expected else None
    except OSError as error:
        raise DataError("this CIFAR-10 file cannot be read", where=str(path), got=error.strerror) from error
    if records is None:
        raise _damaged(path, f"{size:,} bytes", f"exactly {expected:,} bytes")
    records = records.reshape(-1, RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= len(CLASSES))
    if len(wrong):
        raise _damaged(path, f"label {records[wrong[0], 0]} in record {wrong[0]}", "labels from 0 to 9")
    return records


def _damaged(path: Path, got: str, allowed: str) -> DataError:
    return DataError(
        "this CIFAR-10 file is damaged",
        where=str(path),
        got=got,
        allowed=allowed,
        hint=f"delete it and it will be put in place again from {ARCHIVE_NAME}, downloaded if need be",
    )
