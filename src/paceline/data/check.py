"""Checks that a data set is complete: packed pictures, pictures in folders, and the sets of `paceline data fetch`.

Nothing is downloaded and nothing is changed. Errors name each damaged file.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.decoders import in_processes, look_at_pictures
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
from paceline.data.parts import PARTS, TEST, TRAIN
from paceline.data.picture_folder import TEST_ONE_IN, Part, Pictures, find_pictures
from paceline.data.pictures import Seen
from paceline.errors import DataError, printable_line
from paceline.settings.schema import DataConfig

KNOWN = ("cifar10", "fashion-mnist")
_CHUNK_PICTURES = 16
_MOST_NAMES = 6
_FEW_NAMES = 3


@dataclass(frozen=True)
class Checked:
    """Describes a data set that was checked."""

    what: str
    proof: str
    lines: tuple[str, ...] = ()  # what is used for what, and everything that is skipped or suspicious
    unreadable: DataError | None = None


def check_packed(folder: Path, progress: Progress) -> Checked:
    """Check every byte of every shard."""
    packed = read_finished(folder)
    progress.start(packed.size_bytes, 0)
    damages = list(find_damage(folder, packed, progress.advance))
    if damages:
        raise damaged_shard(folder, damages)
    pictures = _counts({part: packed.num_pictures(part) for part in packed.parts})
    grey = f", {len(packed.unreadable)} of them unreadable and replaced by grey" if packed.unreadable else ""
    what = f"{pictures} of {len(packed.classes)} classes, {packed.side} x {packed.side} pixels{grey}"
    return Checked(what, f"{len(packed.shards)} shards, sizes and CRC-32 agree")


def check_pictures(folder: Path, workers: int, progress: Progress) -> Checked:
    """Decode every picture."""
    pictures = find_pictures(folder)
    looks = decode_all(pictures, workers, progress)
    lines = [*_use_lines(pictures), *_skipped_lines(pictures), *_suspicious_lines(pictures, looks)]
    bad = [f"{_name(path, folder)}: {_short(look)}" for path, look in looks.items() if isinstance(look, str)]
    counts = _counts({name: len(part.paths) for name, part in pictures})
    what = f"{counts} of {len(pictures.classes)} classes"
    return Checked(what, "all of them decoded", tuple(lines), _unreadable(folder, bad, len(looks)) if bad else None)


def decode_all(pictures: Pictures, workers: int, progress: Progress) -> dict[Path, Seen | str]:
    """Decode every picture at its full size. For one that cannot be read: why."""
    paths = [path for _, part in pictures for path in part.paths]
    progress.start(len(paths), 0)
    looks: dict[Path, Seen | str] = {}
    chunks = [paths[start : start + _CHUNK_PICTURES] for start in range(0, len(paths), _CHUNK_PICTURES)]
    tasks = [(chunk, ([str(path) for path in chunk],)) for chunk in chunks]
    for chunk, found in in_processes(look_at_pictures, tasks, workers):
        looks.update(zip(chunk, found, strict=True))
        progress.advance(len(chunk))
    return looks


def _counts(sizes: dict[str, int]) -> str:
    *first, last = (f"{size:,} {part}" for part, size in sizes.items())
    return f"{', '.join(first)} and {last} pictures"


def _use_lines(pictures: Pictures) -> list[str]:
    origins = {name: f"{part.folder}: {len(part.paths):,} pictures" for name, part in pictures}
    if pictures.parts[TRAIN].folder == pictures.parts[TEST].folder:
        origins[TEST] += f", about one in {TEST_ONE_IN} by file name"
    no_folder = f"no folder; a run holds samples of {pictures.parts[TRAIN].folder} out (--train-split)"
    return [f"{part:<11} {origins.get(part, no_folder)}" for part in PARTS]


def _skipped_lines(pictures: Pictures) -> list[str]:
    return [
        f"{'skipped':<11} {len(paths):,} ({reason}): {_names(paths, pictures.root)}"
        for reason, paths in sorted(pictures.skipped.by_reason.items())
    ]


def _suspicious_lines(pictures: Pictures, looks: dict[Path, Seen | str]) -> list[str]:
    by_note: dict[str, list[Path]] = defaultdict(list)
    same: dict[bytes, list[Path]] = defaultdict(list)
    for path, look in looks.items():
        if isinstance(look, Seen):
            for note in look.notes:
                by_note[note].append(path)
            same[look.digest].append(path)
    place = {path: (name, label) for name, part in pictures for path, label in _labelled(part)}
    for group in same.values():
        if len({place[path][0] for path in group}) > 1:
            by_note["the same picture in several parts: it is trained on and tested with"] += group
        elif len({place[path][1] for path in group}) > 1:
            by_note["the same picture in several classes"] += group
        elif len(group) > 1:
            by_note["the same picture several times in a class"] += group
    return [
        f"{'note' if note.startswith('turned') else 'suspicious':<11} {len(paths):,} ({note}): "
        f"{_names(paths, pictures.root)}"
        for note, paths in sorted(by_note.items())
    ]


def _labelled(part: Part) -> Iterator[tuple[Path, int]]:
    labels = (label for label, size in enumerate(part.per_class) for _ in range(size))
    return zip(part.paths, labels, strict=True)


def _names(paths: list[Path], root: Path) -> str:
    more = f" and {len(paths) - _FEW_NAMES:,} more" if len(paths) > _FEW_NAMES else ""
    return ", ".join(_name(path, root) for path in paths[:_FEW_NAMES]) + more


def _name(path: Path, root: Path) -> str:
    return printable_line(str(path.relative_to(root)))


def _unreadable(folder: Path, bad: list[str], num_pictures: int) -> DataError:
    more = [f"and {len(bad) - _MOST_NAMES} more"] if len(bad) > _MOST_NAMES else []
    return DataError(
        f"{len(bad)} of {num_pictures:,} pictures cannot be read",
        where=str(folder),
        got="\n".join(bad[:_MOST_NAMES] + more),
        hint=f"replace or remove them, or train with --unreadable {len(bad)}, which replaces them by grey",
    )


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
