"""CIFAR-10 from its official binary files, or from the pickled files that torchvision uses; downloaded if absent.

A binary record is one label byte and 3072 pixel bytes. The file size shows whether a file is complete, and reading
is one reshape. The pickled "python version" is read without an unpickler, because an unpickler executes code that
the file names.
"""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.fetch import fetch_file, locked
from paceline.data.known_files import CIFAR10_FILES as FILES
from paceline.data.known_files import CIFAR10_FOLDER as FOLDER
from paceline.data.known_files import CIFAR10_PICKLED_FILES as PICKLED_FILES
from paceline.data.known_files import cifar10_folder, find_pickled_cifar10, missing_cifar10, missing_pickles
from paceline.data.pickled import UnreadablePickle, array_of_bytes, read_pickle
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE_NAME = "cifar-10-binary.tar.gz"
# MD5 of the official file, and SHA-1 of its records in the layout of the binary file.
PICKLED_CHECKSUMS = {
    "data_batch_1": ("c99cafc152244af753f735de768cd75f", "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
    "data_batch_2": ("d4bba439e000b95fd0a9bffe97cbabec", "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
    "data_batch_3": ("54ebc095f3ab1f0389bbae665268c751", "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
    "data_batch_4": ("634d18415352ddfa80567beed471001a", "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
    "data_batch_5": ("482c414d41f54cd18b22e5b47cb7c3cb", "26e2849e66a845b7f1e4614ae70f4889ae604628"),
    "test_batch": ("40351d587109b95175f43aff81a1287e", "67eb016db431130d61cd03c7ad570b013799c88c"),
}

RECORDS_PER_FILE = 10_000
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
# Pixels, label and file name. Text takes up to two bytes per pixel.
_MOST_PICKLED_BYTES_PER_RECORD = 2 * RECORD_BYTES
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return DatasetInfo(
        name="cifar10",
        num_train=RECORDS_PER_FILE * (len(FILES) - 1),
        num_test=RECORDS_PER_FILE,
        classes=CLASSES,
        sample_shape=SHAPE,
        mean=MEAN,
        std=STD,
    )


def load(config: DataConfig, seed: int) -> LoadedData:
    data_dir = Path(config.data_dir)
    folder = cifar10_folder(data_dir)
    if missing_cifar10(folder) and (pickled := find_pickled_cifar10(data_dir)) and not missing_pickles(pickled):
        records = [read_pickled_records(pickled / name) for name in PICKLED_FILES]
    else:
        if missing_cifar10(folder):
            _fetch(folder, data_dir)
        records = [_records(folder / name) for name in FILES]
    return LoadedData(describe(config, seed), _resident(records[:-1]), _resident(records[-1:]))


def _fetch(folder: Path, data_dir: Path) -> None:
    """Download and unpack the missing files. Each appears complete, so a reader that sees all six may read."""
    try:
        with locked(folder):
            if missing := missing_cifar10(folder):
                archive = fetch_file(
                    ARCHIVE_URL,
                    folder.parent / ARCHIVE_NAME,
                    checksum=ARCHIVE_MD5,
                    algorithm="md5",
                    what="CIFAR-10",
                )
                size = RECORDS_PER_FILE * RECORD_BYTES
                unpack(archive, folder, [f"{FOLDER}/{name}" for name in missing], size)
    except DataError as error:
        if pickled := find_pickled_cifar10(data_dir):
            raise _incomplete(pickled, error) from error
        raise
    except OSError as error:
        raise DataError("could not put CIFAR-10 in place", where=str(folder), got=error) from error


def unpack(archive: Path, folder: Path, wanted: list[str], size_bytes: int | None = None) -> None:
    """Extract only the wanted members into a temporary folder, then move them into place. Also used by CIFAR-100."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder.parent) as name:
        try:
            with tarfile.open(archive) as tar:
                for member in wanted:
                    tar.extract(_member(tar, member, size_bytes), name, filter="data")
        except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error) as error:
            raise DataError(
                "this archive cannot be unpacked",
                where=str(archive),
                got=str(error) or type(error).__name__,
                hint="delete it and it will be downloaded again",
            ) from error
        folder.mkdir(exist_ok=True)
        for member in wanted:
            (Path(name) / member).replace(folder / Path(member).name)


def _member(tar: tarfile.TarFile, name: str, size_bytes: int | None) -> tarfile.TarInfo:
    member = tar.getmember(name)
    if not member.isfile() or size_bytes not in (None, member.size):
        raise tarfile.TarError(f"{name} is not a file" + (f" of {size_bytes} bytes" if size_bytes else ""))
    return member


def _incomplete(pickled: Path, error: DataError) -> DataError:
    return DataError(
        "CIFAR-10 is not complete",
        where=str(pickled),
        got=f"no {', '.join(missing_pickles(pickled))}; and {error.what}: {error.got}",
        allowed=f"{', '.join(PICKLED_FILES)}, or a folder {FOLDER} with {', '.join(FILES)}",
        hint=f"get {ARCHIVE_URL}\n{error.hint}" if error.where == ARCHIVE_URL else error.hint,
    )


def _resident(parts: list[NDArray[np.uint8]]) -> ResidentDataset:
    records = np.concatenate(parts)
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
    return _with_known_labels(records.reshape(-1, RECORD_BYTES), path)


def read_pickled_records(path: Path) -> NDArray[np.uint8]:
    """The records of a pickled file, in the layout of the binary file."""
    labels, pixels = read_pickled(path, RECORDS_PER_FILE, "labels", len(CLASSES), "CIFAR-10")
    return np.column_stack([np.array(labels, dtype=np.uint8), pixels])


def read_pickled(path: Path, count: int, key: str, num_classes: int, name: str) -> tuple[list[int], NDArray[np.uint8]]:
    """Labels and pixels [count, 3072] of a pickled file. Also used by CIFAR-100."""
    most_bytes = count * _MOST_PICKLED_BYTES_PER_RECORD + 2**16
    try:
        content = read_pickle(path, most_bytes)
        if not isinstance(content, dict) or "data" not in content or key not in content:
            raise UnreadablePickle(f"no dictionary with data and {key}")
        pixels = array_of_bytes(content["data"], (count, RECORD_BYTES - 1))
        labels = content[key]
        if not isinstance(labels, list) or len(labels) != count:
            found = f"{len(labels):,}" if isinstance(labels, list) else "no list of"
            raise UnreadablePickle(f"{found} labels for {count:,} pictures")
        for number, label in enumerate(labels):
            if type(label) is not int or not 0 <= label < num_classes:
                got = f"label {label} in record {number}" if type(label) is int else "labels that are not numbers"
                raise UnreadablePickle(f"{got}, not from 0 to {num_classes - 1}")
    except OSError as error:
        raise DataError(f"this {name} file cannot be read", where=str(path), got=error.strerror) from error
    except UnreadablePickle as error:
        raise DataError(
            f"this {name} file is damaged, or holds something other than data",
            where=str(path),
            got=str(error),
            allowed="plain data and arrays, like torchvision's files; nothing in a file is executed",
            hint=f"remove {path.parent}; {name} is then downloaded, with its checksum",
        ) from error
    return labels, pixels


def _with_known_labels(records: NDArray[np.uint8], path: Path) -> NDArray[np.uint8]:
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
        hint=f"delete it; it is then extracted again from {ARCHIVE_NAME}, which is downloaded if it is absent",
    )
