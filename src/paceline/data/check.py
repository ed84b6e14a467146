"""Checks that a data set is complete: packed pictures, folders, archives, and the sets of `paceline data fetch`.

Nothing is downloaded and nothing is changed. Errors name each damaged file.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.data.decoders import in_processes, look_at, look_at_pictures
from paceline.data.known_files import (
    CIFAR10_FILES,
    CIFAR10_FOLDER,
    CIFAR100_MD5,
    FASHION_MNIST_FOLDER,
    FASHION_MNIST_MD5,
    cifar10_folder,
    cifar100_folder,
    find_fashion_mnist,
    find_pickled_cifar10,
    missing_cifar10,
    missing_cifar100,
    missing_pickles,
)
from paceline.data.pack import Progress
from paceline.data.pack_format import damaged_shard, find_damage, read_finished
from paceline.data.parts import PARTS, TEST, TRAIN
from paceline.data.picture_folder import TEST_ONE_IN, Part, Pictures, find_pictures
from paceline.data.pictures import Seen
from paceline.errors import DataError, printable_line
from paceline.settings.schema import DataConfig
from paceline.settings.tasks import MULTI_LABEL, REGRESSION

KNOWN = ("cifar10", "cifar100", "fashion-mnist")
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
    what = f"{pictures} of {len(packed.classes)} classes, {packed.describe_pictures()}{grey}"
    return Checked(what, f"{len(packed.shards)} shards, sizes and CRC-32 agree")


@dataclass(frozen=True)
class Look:
    """A picture that was decoded at its full size, or why it cannot be."""

    name: str
    part: str
    label: Hashable  # a class, or the labels of a table
    found: Seen | str


def check_pictures(folder: Path, workers: int, progress: Progress) -> Checked:
    """Decode every picture."""
    pictures = find_pictures(folder)
    placed = [(path, name, label) for name, part in pictures for path, label in _labelled(part)]
    looks = _decode_all(placed, folder, workers, progress)
    skipped = {
        reason: (len(paths), [_name(path, pictures.root) for path in paths[:_FEW_NAMES]])
        for reason, paths in pictures.skipped.by_reason.items()
    }
    return _checked(str(folder), f"of {len(pictures.classes)} classes", _use_lines(pictures), skipped, looks)


def check_tables(folder: Path, workers: int, progress: Progress) -> Checked:
    """Decode every picture that the CSV files list, and say what the labels are for."""
    from paceline.data.picture_table import read_tables

    try:
        table = read_tables(folder, REGRESSION)
    except DataError:
        table = read_tables(folder, MULTI_LABEL)  # it accepts every label
    placed = [(item.path, part, item.labels) for part, items in table.parts.items() for item in items]
    looks = _decode_all(placed, folder, workers, progress)
    alone = f", about one in {TEST_ONE_IN} by path" if table.files[TRAIN] == table.files[TEST] else ""
    uses = [
        f"{part:<11} {table.files[part]}: {len(items):,} pictures{alone if part == TEST else ''}"
        for part, items in table.parts.items()
    ]
    uses.append(f"{'labels':<11} {_kind_of_labels([labels for _, _, labels in placed])}")
    return _checked(str(folder), "of tables", uses, {}, looks)


def _kind_of_labels(texts: list[tuple[str, ...]]) -> str:
    """What a person can train with these labels."""
    fewest, most = min(map(len, texts)), max(map(len, texts))
    classes = f"{len({label for labels in texts for label in labels}):,} classes"
    each = "one" if fewest == most == 1 else f"{fewest} to {most}" if fewest < most else f"{most}"
    kind = f"{classes}, {each} per picture: --task {'single-label' if each == 'one' else 'multi-label'}"
    try:
        numbers = [float(label) for labels in texts for label in labels]
    except ValueError:
        return kind
    return f"numbers from {min(numbers):g} to {max(numbers):g}: --task regression; or {kind}"


def check_archives(config: DataConfig, workers: int, progress: Progress) -> Checked:
    """Decode every picture of tar, zip and parquet files."""
    from paceline.data.archives.opened import open_archives

    opened = open_archives(config)
    parts = opened.catalog.parts
    progress.start(sum(map(len, parts.values())), 0)
    looks = []
    with ThreadPoolExecutor(workers, "check") as pool:
        for part, about in parts.items():
            pictures = opened.pictures(part)
            labels = [label for label, size in enumerate(about.per_class) for _ in range(size)]
            found = pool.map(partial(look_at, pictures), range(len(pictures)))
            for name, label, seen in zip(pictures.names(), labels, found, strict=True):
                looks.append(Look(printable_line(os.fsdecode(name)), part, label, seen))
                progress.advance(1)
    origins = {part: f"{about.origin}: {len(about):,} pictures" for part, about in parts.items()}
    held_out = f"none; a run holds samples of {TRAIN} out (--train-split)"
    uses = [f"{part:<11} {origins.get(part, held_out)}" for part in PARTS]
    of = f"of {len(opened.catalog.classes)} classes"
    return _checked(opened.place.name, of, uses, opened.catalog.skipped, looks)


def _checked(
    where: str,
    of: str,
    uses: list[str],
    skipped: dict[str, tuple[int, list[str]]],
    looks: list[Look],
) -> Checked:
    lines = [
        *uses,
        *(
            f"{'skipped':<11} {count:,} ({reason}): {_names(names, count)}"
            for reason, (count, names) in sorted(skipped.items())
        ),
        *_suspicious_lines(looks),
    ]
    bad = [f"{look.name}: {_short(look.found)}" for look in looks if isinstance(look.found, str)]
    sizes = Counter(look.part for look in looks)
    what = f"{_counts({part: sizes[part] for part in PARTS if sizes[part]})} {of}"
    return Checked(what, "all of them decoded", tuple(lines), _unreadable(where, bad, len(looks)) if bad else None)


def _decode_all(
    placed: Sequence[tuple[Path, str, Hashable]], root: Path, workers: int, progress: Progress
) -> list[Look]:
    """`placed`: file, part and label of each picture."""
    progress.start(len(placed), 0)
    looks: list[Look] = []
    chunks = [placed[start : start + _CHUNK_PICTURES] for start in range(0, len(placed), _CHUNK_PICTURES)]
    tasks = [(chunk, ([str(path) for path, _, _ in chunk],)) for chunk in chunks]
    for chunk, found in in_processes(look_at_pictures, tasks, workers):
        for (path, part, label), seen in zip(chunk, found, strict=True):
            looks.append(Look(_name(path, root), part, label, seen))
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


def _suspicious_lines(looks: list[Look]) -> list[str]:
    by_note: dict[str, list[str]] = defaultdict(list)
    same: dict[bytes, list[Look]] = defaultdict(list)
    for look in looks:
        if isinstance(look.found, Seen):
            for note in look.found.notes:
                by_note[note].append(look.name)
            same[look.found.digest].append(look)
    for group in same.values():
        names = [look.name for look in group]
        if len({look.part for look in group}) > 1:
            by_note["the same picture in several parts: it is trained on and tested with"] += names
        elif len({look.label for look in group}) > 1:
            by_note["the same picture in several classes, or with different labels"] += names
        elif len(group) > 1:
            by_note["the same picture several times in a class, or with the same labels"] += names
    return [
        f"{'note' if note.startswith('turned') else 'suspicious':<11} {len(names):,} ({note}): "
        f"{_names(names, len(names))}"
        for note, names in sorted(by_note.items())
    ]


def _labelled(part: Part) -> Iterator[tuple[Path, int]]:
    labels = (label for label, size in enumerate(part.per_class) for _ in range(size))
    return zip(part.paths, labels, strict=True)


def _names(names: list[str], count: int) -> str:
    more = f" and {count - _FEW_NAMES:,} more" if count > _FEW_NAMES else ""
    return ", ".join(printable_line(name) for name in names[:_FEW_NAMES]) + more


def _name(path: Path, root: Path) -> str:
    return printable_line(str(path.relative_to(root)))


def _unreadable(where: str, bad: list[str], num_pictures: int) -> DataError:
    more = [f"and {len(bad) - _MOST_NAMES} more"] if len(bad) > _MOST_NAMES else []
    return DataError(
        f"{len(bad)} of {num_pictures:,} pictures cannot be read",
        where=where,
        got="\n".join(bad[:_MOST_NAMES] + more),
        hint=f"replace or remove them, or train with --unreadable {len(bad)}, which replaces them by grey",
    )


def _short(why: str) -> str:
    return why if len(why) <= 60 else f"{why[:57]}..."


def check_known(name: str, data_dir: Path) -> Checked:
    """Check a known data set in `data_dir`. A set that is absent is an error, too."""
    checks = {"cifar10": _check_cifar10, "cifar100": _check_cifar100, "fashion-mnist": _check_fashion_mnist}
    proof = checks[name](data_dir)
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


def _check_cifar100(data_dir: Path) -> str:
    folder = cifar100_folder(data_dir)
    if missing := missing_cifar100(folder):
        raise _absent("cifar100", data_dir, f"no {', '.join(missing)} in {folder}")
    for name, md5 in CIFAR100_MD5.items():
        _require_md5(folder / name, md5)
    return "MD5 of all files agree"


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
