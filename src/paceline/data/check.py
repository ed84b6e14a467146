"""Checks that a data set is complete: packed pictures, pictures in folders, and the sets of `paceline data fetch`.

Nothing is downloaded and nothing is changed. Errors name each damaged file.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from paceline.data.decoders import find_unreadable, in_processes
from paceline.data.known_files import (
    CIFAR10_FILES,
    CIFAR10_FOLDER,
    FASHION_MNIST_FOLDER,
    FASHION_MNIST_MD5,
    cifar10_folder,
    find_fashion_mnist,
    find_pickled_cifar10,
    missing_cifar10,
    missing_pickles,
)
from paceline.data.pack import Progress
from paceline.data.pack_format import damaged_shard, find_damage, read_finished
from paceline.data.pictures import find_pictures
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

KNOWN = ("cifar10", "fashion-mnist")
_CHUNK_PICTURES = 16
_MOST_NAMES = 6


@dataclass(frozen=True)
class Checked:
    """Describes a data set that passed the check."""

    what: str
    proof: str


def check_packed(folder: Path, progress: Progress) -> Checked:
    """Check every byte of every shard."""
    packed = read_finished(folder)
    progress.start(packed.size_bytes, 0)
    damages = list(find_damage(folder, packed, progress.advance))
    if damages:
        raise damaged_shard(folder, damages)
    pictures = f"{packed.num_pictures('train'):,} train and {packed.num_pictures('test'):,} test pictures"
    grey = f", {len(packed.unreadable)} of them unreadable and replaced by grey" if packed.unreadable else ""
    what = f"{pictures} of {len(packed.classes)} classes, {packed.side} x {packed.side} pixels{grey}"
    return Checked(what, f"{len(packed.shards)} shards, sizes and CRC-32 agree")


def check_pictures(folder: Path, workers: int, progress: Progress) -> Checked:
    """Decode every picture."""
    pictures = find_pictures(folder)
    paths = pictures.train.paths + pictures.test.paths
    progress.start(len(paths), 0)
    bad: list[str] = []
    chunks = [paths[start : start + _CHUNK_PICTURES] for start in range(0, len(paths), _CHUNK_PICTURES)]
    tasks = [(chunk, ([str(path) for path in chunk],)) for chunk in chunks]
    for chunk, unreadable in in_processes(find_unreadable, tasks, workers):
        bad += [f"{chunk[number].relative_to(folder)}: {_short(why)}" for number, why in unreadable]
        progress.advance(len(chunk))
    if bad:
        raise DataError(
            f"{len(bad)} of {len(paths):,} pictures cannot be read",
            where=str(folder),
            got="\n".join(
                bad[:_MOST_NAMES] + ([f"and {len(bad) - _MOST_NAMES} more"] if len(bad) > _MOST_NAMES else [])
            ),
            hint=f"replace or remove them, or train with --unreadable {len(bad)}, which replaces them by grey",
        )
    counts = f"{len(pictures.train.paths):,} train and {len(pictures.test.paths):,} test pictures"
    return Checked(f"{counts} of {len(pictures.classes)} classes", "all of them decoded")


def _short(why: str) -> str:
    return why if len(why) <= 60 else f"{why[:57]}..."


def check_known(name: str, data_dir: Path) -> Checked:
    """Check a known data set in `data_dir`. A set that is absent is an error, too."""
    proof = _check_cifar10(data_dir) if name == "cifar10" else _check_fashion_mnist(data_dir)
    return Checked(describe_known(name, data_dir), proof)


def describe_known(name: str, data_dir: Path) -> str:
    """Load the data set, which downloads absent files and checks sizes, shapes and labels."""
    from paceline.data.registry import load_dataset

    info = load_dataset(DataConfig(dataset=name, data_dir=str(data_dir)), 0).info
    shape = " x ".join(map(str, info.sample_shape))
    return f"{info.num_train:,} train and {info.num_test:,} test samples of {info.num_classes} classes, {shape}"


def _check_cifar10(data_dir: Path) -> str:
    from paceline.data.sources import cifar10

    folder = cifar10_folder(data_dir)
    if missing := missing_cifar10(folder):
        pickled = find_pickled_cifar10(data_dir)
        if pickled is not None and not missing_pickles(pickled):
            return _check_pickled_cifar10(pickled)
        raise _absent("cifar10", data_dir, f"no {', '.join(missing)} in {folder}")
    archive = folder.parent / cifar10.ARCHIVE_NAME
    if not archive.exists():
        return f"sizes and labels agree (without {cifar10.ARCHIVE_NAME} beside it, bytes cannot be compared)"
    _require_md5(archive, cifar10.ARCHIVE_MD5)
    try:
        with tarfile.open(archive) as tar:
            for file in CIFAR10_FILES:
                member = tar.extractfile(f"{CIFAR10_FOLDER}/{file}")
                if member is None or member.read() != (folder / file).read_bytes():
                    raise _damaged(folder / file, f"other bytes than in {cifar10.ARCHIVE_NAME}")
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error) as error:
        raise _damaged(archive, str(error) or type(error).__name__) from error
    return f"every byte as in {cifar10.ARCHIVE_NAME}, whose MD5 agrees"


def _check_pickled_cifar10(folder: Path) -> str:
    """Accept the official files, and files that were pickled again with the same labels and pixels."""
    from paceline.data.sources import cifar10

    for file, (md5, records_sha1) in cifar10.PICKLED_CHECKSUMS.items():
        with (folder / file).open("rb") as stream:
            found = hashlib.file_digest(stream, "md5").hexdigest()
        if found != md5:
            records = cifar10.read_pickled_records(folder / file)
            if hashlib.sha1(records.tobytes()).hexdigest() != records_sha1:
                raise _damaged(folder / file, f"MD5 {found}, expected {md5}; and other labels or pixels")
    return "every label and pixel as in the official files"


def _check_fashion_mnist(data_dir: Path) -> str:
    unproved = []
    for name, md5 in FASHION_MNIST_MD5.items():
        path = find_fashion_mnist(data_dir, name)
        if path is None:
            raise _absent("fashion-mnist", data_dir, f"no {name}.gz in {data_dir / FASHION_MNIST_FOLDER}")
        if path.suffix == ".gz":
            _require_md5(path, md5)
        else:
            unproved.append(path.name)
    return "MD5 of all files agree" if not unproved else "sizes, shapes and labels agree (MD5 is known of .gz files)"


def _require_md5(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != wanted:
        raise _damaged(path, f"MD5 {found}, expected {wanted}")


def _damaged(path: Path, got: str) -> DataError:
    return DataError(
        "this file is damaged",
        where=str(path),
        got=got,
        hint="delete it, then download it again: paceline data fetch NAME",
    )


def _absent(name: str, data_dir: Path, got: str) -> DataError:
    return DataError(
        f"{name} is not there",
        where=str(data_dir.absolute()),
        got=got,
        hint=f"paceline data fetch {name} --data-dir {data_dir}",
    )
