"""The parts of a data set and their names, the same for folders, packed folders and functions. Imports no torch.

A validation set of its own is optional. Without one, a run holds some of the training samples out (`--train-split`).
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import DataError

TRAIN, VALIDATION, TEST = PARTS = ("train", "validation", "test")
NAMES = {TRAIN: ("train",), VALIDATION: ("val", "valid", "validation"), TEST: ("test",)}
LAYOUT = "train/CLASS/PICTURE and test/CLASS/PICTURE (also val/CLASS/PICTURE), or CLASS/PICTURE"
TABLE_ALONE = "labels.csv"
TABLE_LAYOUT = f"train.csv and test.csv (also val.csv), or {TABLE_ALONE}, with the columns path and label"


def part_named(name: str) -> str | None:
    """The part that a folder or a key of this name is, in upper or lower case."""
    return next((part for part, names in NAMES.items() if name.lower() in names), None)


def part_folders(root: Path) -> dict[str, str]:
    """The folders that hold the parts, by part. Empty if `root` has no train folder: then it holds the classes."""
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
    if not found[TEST]:
        has_validation = f"{found[VALIDATION][0]} holds the validation pictures; " if found[VALIDATION] else ""
        raise DataError(
            "there is a train folder but no test folder",
            where=str(root),
            got=", ".join(names),
            allowed=LAYOUT,
            hint=f"{has_validation}move some pictures to test/CLASS"
            + (f", or rename {found[VALIDATION][0]} to test" if found[VALIDATION] else ""),
        )
    return {part: same[0] for part, same in found.items() if same}
