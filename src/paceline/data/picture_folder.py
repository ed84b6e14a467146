"""Folders of pictures: which files are read, as which part and class, and which are not. Opens no picture.

The layout is DATA_DIR/train/CLASS/PICTURE and DATA_DIR/test/CLASS/PICTURE, with or without DATA_DIR/val/CLASS/PICTURE.
Without a train folder it is DATA_DIR/CLASS/PICTURE, and about every fifth picture is kept for the test. The split
depends only on the file name. Adding pictures does not move existing ones. Pictures in folders below a class folder
belong to that class. The pictures of val or test may lie in one folder, with a list of their classes, as ImageNet is
published (`validation_list.py`). Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.data.parts import (
    LAYOUT,
    NAMES,
    PARTS,
    TEST,
    TRAIN,
    hidden_reason,
    is_flat,
    no_training_data,
    part_folders,
    pictures_root,
    require_class_folders,
)
from paceline.data.pictures import ABSENT_EXTENSIONS, EXTENSIONS
from paceline.data.validation_list import flat_pictures, is_list, read_validation_list
from paceline.errors import DataError
from paceline.settings.text import check_text

TEST_ONE_IN = 5
# Names of folders that are rarely classes. Without a train folder, one with further folders in it is refused.
_LIKE_PARTS = frozenset({*(name for names in NAMES.values() for name in names), "training", "testing", "dev", "eval"})
_Classes = dict[str, list[Path]]
_DEEPEST = 32  # folders below a class folder; also ends a loop of links


@dataclass(frozen=True)
class Part:
    """The training, validation or test pictures, class by class and in each class by name."""

    paths: list[Path]
    per_class: list[int]
    folder: str  # relative to the root, with a slash at its end


@dataclass
class Skipped:
    """Files and folders that are not read, by reason."""

    by_reason: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))

    def add(self, reason: str, path: Path) -> None:
        self.by_reason[reason].append(path)

    def __len__(self) -> int:
        return sum(map(len, self.by_reason.values()))


@dataclass(frozen=True)
class Pictures:
    """All pictures of a folder; none of them has been opened."""

    root: Path
    classes: tuple[str, ...]
    parts: dict[str, Part]  # train, test, and validation if there is a folder for it
    skipped: Skipped

    def __iter__(self) -> Iterator[tuple[str, Part]]:
        return iter(self.parts.items())


def find_pictures(root: Path) -> Pictures:
    """Class names and file names; opens no picture."""
    skipped = Skipped()
    try:
        root = pictures_root(root)
        folders = part_folders(root)
        parts = _several_folders(root, folders, skipped) if folders else _one_folder(root, skipped)
    except OSError as error:
        raise DataError("this folder cannot be read", where=str(error.filename or root), got=error.strerror) from error
    classes = tuple(next(iter(parts.values())))
    return Pictures(root, classes, {part: _part(found, root, folders, part) for part, found in parts.items()}, skipped)


def _several_folders(root: Path, folders: dict[str, str], skipped: Skipped) -> dict[str, _Classes]:
    for entry in _sorted(root):
        if entry.name not in folders.values():
            is_folder = entry.is_dir()
            if is_list(entry.name):
                continue
            reason = "not in a class folder" if not is_folder else "a folder beside train that is no part of the data"
            skipped.add(hidden_reason(entry.name) or reason, Path(entry.path))
    train = _by_class(root / folders[TRAIN], skipped)
    parts = {TRAIN: train}
    for part in [part for part in PARTS[1:] if part in folders]:
        folder = root / folders[part]
        found = parts[part] = _by_list(folder, list(train), skipped) if is_flat(folder) else _by_class(folder, skipped)
        if found.keys() != train.keys():
            only = [f"{name}: only in {folders[TRAIN]}" for name in sorted(train.keys() - found.keys())]
            only += [f"{name}: only in {folders[part]}" for name in sorted(found.keys() - train.keys())]
            raise DataError(
                f"{folders[TRAIN]} and {folders[part]} do not hold the same classes",
                where=str(root),
                got=", ".join(only[:8]) + (f" and {len(only) - 8} more" if len(only) > 8 else ""),
                allowed="one folder per class, of the same name, in both",
            )
    return parts


def _one_folder(root: Path, skipped: Skipped) -> dict[str, _Classes]:
    found = _by_class(root, skipped)
    _require_classes(root, found)
    kept = {name: [path for path in paths if not is_kept_for_test(path, root)] for name, paths in found.items()}
    held = {name: [path for path in paths if is_kept_for_test(path, root)] for name, paths in found.items()}
    if not all(kept.values()) or not any(held.values()):
        raise DataError(
            "there are too few pictures to split off a test set",
            where=str(root),
            got=", ".join(f"{name}: {len(paths)}" for name, paths in list(found.items())[:8]),
            hint="add pictures, or sort them into train/ and test/ yourself",
        )
    return {TRAIN: kept, TEST: held}


def _require_classes(root: Path, found: _Classes) -> None:
    """Refuse folders that look like parts of a data set, or like folders above the class folders."""
    nested = [name for name, paths in found.items() if all(path.parent != root / name for path in paths)]
    like_parts = [name for name in nested if name.lower() in _LIKE_PARTS]
    below = [{path.relative_to(root / name).parts[0] for path in found[name]} for name in nested]
    is_repeated = len(nested) == len(found) and all(names == below[0] for names in below)
    if like_parts or is_repeated:
        names = like_parts or nested
        raise DataError(
            "these folders do not look like classes: their pictures lie in further folders",
            where=str(root),
            got=", ".join(names[:8]) + f", with {', '.join(sorted(below[nested.index(names[0])])[:4])} in {names[0]}",
            allowed=LAYOUT,
            hint="name the folders train and test (and val), or point --data-dir at the folder of the classes",
        )


def is_kept_for_test(path: Path, root: Path) -> bool:
    """By its name alone."""
    return is_name_kept_for_test(os.fsencode(path.relative_to(root).as_posix()))  # a name may not be UTF-8


def is_name_kept_for_test(name: bytes) -> bool:
    """`name`: relative to the root of the data."""
    digest = hashlib.sha256(name).digest()
    return int.from_bytes(digest[:8]) % TEST_ONE_IN == 0


def _part(pictures: _Classes, root: Path, folders: dict[str, str], part: str) -> Part:
    paths = [path for group in pictures.values() for path in group]
    folder = f"{folders[part]}/" if folders else f"{root.name or root}/"
    return Part(paths, [len(group) for group in pictures.values()], folder)


def _by_class(folder: Path, skipped: Skipped) -> _Classes:
    """Pictures per class. Classes and pictures are sorted by name."""
    names = require_class_folders(folder)
    for entry in _sorted(folder):
        reason = hidden_reason(entry.name) or ("" if entry.is_dir() else "not in a class folder")
        if reason:
            skipped.add(reason, Path(entry.path))
    for name in names:
        # The folder name becomes the class name in JSON, tables, pages and label files.
        check_text(name, "the name of a class folder", where=str(folder), hint="rename the folder")
    found = {name: sorted(_pictures_in(folder / name, skipped), key=os.fspath) for name in names}
    if empty := [name for name, paths in found.items() if not paths]:
        error = no_training_data(folder, "no pictures in " + ", ".join(empty[:8]))
        error.allowed = f"pictures in every class folder ({', '.join(sorted(EXTENSIONS))})"
        raise error
    return found


def _by_list(folder: Path, classes: list[str], skipped: Skipped) -> _Classes:
    """Pictures per class, of a folder without class folders. A class may have none of them."""
    place, names = flat_pictures(folder), []
    for entry in _sorted(place):
        if reason := hidden_reason(entry.name) or _is_no_picture(entry):
            if not is_list(entry.name):
                skipped.add(reason, place / entry.name)
        else:
            names.append(entry.name)
    class_of = read_validation_list(folder, classes, names)
    found: _Classes = {name: [] for name in classes}
    for name in names:
        found[class_of[name]].append(place / name)
    return found


def _pictures_in(folder: Path, skipped: Skipped, depth: int = 0) -> Iterator[Path]:
    if depth > _DEEPEST:
        raise DataError(
            "folders are nested too deeply", where=str(folder), allowed=f"{_DEEPEST}", hint="a link may form a loop"
        )
    for entry in _sorted(folder):
        reason = hidden_reason(entry.name)
        if not reason and entry.is_dir():
            yield from _pictures_in(folder / entry.name, skipped, depth + 1)
            continue
        reason = reason or _is_no_picture(entry)
        if reason:
            skipped.add(reason, folder / entry.name)
        else:
            yield folder / entry.name


def _sorted(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _is_no_picture(entry: os.DirEntry[str]) -> str:
    """Why a file is not read; empty if it is."""
    extension = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122
    if not entry.is_file():
        return "not a file, or a broken link"
    if extension in ABSENT_EXTENSIONS:
        return f"{extension}: this Pillow has no decoder for it"
    return "" if extension in EXTENSIONS else f"{extension or 'no extension'}: not the name of a picture that is read"
