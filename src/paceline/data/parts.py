"""The parts of a data set and their names, the same for folders, packed folders and functions. Imports no torch.

A validation set of its own is optional. Without one, a run holds some of the training samples out (`--train-split`).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from paceline.errors import DataError

TRAIN, VALIDATION, TEST = PARTS = ("train", "validation", "test")
NAMES = {TRAIN: ("train",), VALIDATION: ("val", "valid", "validation"), TEST: ("test",)}
# Folders that other programs make.
_SYSTEM = frozenset({"__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found", "__pycache__"})
LAYOUT = "train/CLASS/PICTURE and test/CLASS/PICTURE (also val/CLASS/PICTURE), or CLASS/PICTURE"
KAGGLE = Path("ILSVRC", "Data", "CLS-LOC")
FLAT_FOLDER = "images"  # as in Tiny ImageNet
_LONGEST_LINE = 4096
TABLE_ALONE = "labels.csv"
TABLE_LAYOUT = f"train.csv and test.csv (also val.csv), or {TABLE_ALONE}, with the columns path and label"


def part_named(name: str) -> str | None:
    """The part that a folder or a key of this name is, in upper or lower case."""
    return next((part for part, names in NAMES.items() if name.lower() in names), None)


def pictures_root(folder: Path) -> Path:
    """The folder that holds train: `folder`, or the one inside of it in Kaggle's copy of ImageNet."""
    return folder / KAGGLE if (folder / KAGGLE / "train").is_dir() else folder


def part_folders(root: Path) -> dict[str, str]:
    """The folders that hold the parts, by part. Empty if `root` has no train folder: then it holds the classes.

    Without test pictures that have labels, the validation pictures are the test pictures, as is usual for ImageNet.
    """
    names = sorted(e.name for e in os.scandir(root) if e.is_dir())
    found = {part: [name for name in names if part_named(name) == part] for part in PARTS}
    if not found[TRAIN]:
        return {}
    for part, same in found.items():
        if len(same) > 1:
            raise DataError(
                f"there are several folders for the {part} pictures",
                where=str(root),
                got=", ".join(same),
                allowed=f"one of {', '.join(NAMES[part])}",
                hint="rename or move the others",
            )
    if found[VALIDATION] and (not found[TEST] or is_flat(root / found[TEST][0])):
        found[TEST], found[VALIDATION] = found[VALIDATION], []
    if not found[TEST]:
        raise DataError(
            "there is a train folder but no test folder",
            where=str(root),
            got=", ".join(names),
            allowed=LAYOUT,
            hint="move some pictures to test/CLASS",
        )
    return {part: same[0] for part, same in found.items() if same}


def is_flat(folder: Path) -> bool:
    """Whether a folder holds pictures without class folders (also in a folder `images`). A list has their classes."""
    return not [name for name in _folders_in(folder) if name != FLAT_FOLDER]


def has_tables(root: Path) -> bool:
    """Whether a CSV file in this folder lists the training pictures. Reads its first line."""
    for name in ("train.csv", TABLE_ALONE):
        if (root / name).is_file():
            with (root / name).open("rb") as file:
                columns = file.readline(_LONGEST_LINE).decode("utf-8-sig", "replace").strip().split(",")
            return {"path", "label"} <= {column.strip('"') for column in columns}
    return False


def hidden_reason(name: str) -> str:
    """Why a file or folder of this name is skipped; empty if it is not."""
    return "hidden, or made by the system" if name.startswith(".") or name.lower() in _SYSTEM else ""


def require_class_folders(folder: Path) -> list[str]:
    """The names of the class folders, sorted. DataError if there are fewer than two. Reads no further folder."""
    names = _folders_in(folder)
    if len(names) > 1:
        return names
    if has_tables(folder):
        error = no_training_data(folder, "CSV files that list pictures")
        error.hint = "--dataset csv, which reads them"
        raise error
    if not names:
        raise no_training_data(folder, "no class folder")
    error = no_training_data(folder, f"1 class folder: {names[0]}")
    below = _folders_in(folder / names[0])
    if len(below) > 1:
        error.hint = f"--data-dir {shlex.quote(str(folder / names[0]))}, which holds {len(below)} folders"
    else:
        error.hint = f"a classifier needs a second class: add a folder beside {names[0]}"
    raise error


def _folders_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not hidden_reason(entry.name))


def no_training_data(folder: Path, got: str) -> DataError:
    return DataError(
        "there is no training data in this folder",
        where=str(folder.absolute()),
        got=got,
        allowed="two or more class folders with pictures",
        hint=f"arrange the pictures as {LAYOUT}",
    )
