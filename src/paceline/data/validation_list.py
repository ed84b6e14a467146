"""The lists that give the classes of ImageNet's validation pictures, which lie in one folder. Imports no torch.

A line of a list is `PICTURE CLASS ...`, or only the class, for the pictures sorted by name. A class is the name of a
class folder (WNID). Lists of numbers alone count classes as the ILSVRC2012 development kit does, which is not the order
of the folders: they need `map_clsloc.txt` beside them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from paceline.data.parts import FLAT_FOLDER, KAGGLE
from paceline.errors import DataError

LISTS = (
    "val_annotations.txt",  # Tiny ImageNet
    "LOC_val_solution.csv",  # Kaggle
    "imagenet_2012_validation_synset_labels.txt",
    "ILSVRC2012_validation_ground_truth.txt",
    "val.txt",
)
NUMBERS_OF_CLASSES = "map_clsloc.txt"  # lines: WNID NUMBER WORDS
_MOST_LIST_BYTES = 256 * 2**20


def read_validation_list(folder: Path, classes: list[str], names: list[str]) -> dict[str, str]:
    """The class of each picture of `folder` by its name. `names`: the pictures, sorted."""
    path = _find(folder, LISTS)
    if path is None:
        raise DataError(
            "the pictures of this folder have no classes",
            where=str(folder),
            got=f"{len(names):,} pictures without class folders, and no list of their classes",
            allowed=f"one of {', '.join(LISTS)}, in this folder or beside it",
            hint="or sort the pictures into a folder for each class",
        )
    rows = list(_rows(path))
    named = {Path(row[0]).stem: row[1] for row in rows if len(row) > 1}
    if named:
        found = {name: named[Path(name).stem] for name in names if Path(name).stem in named}
    elif len(rows) == len(names):
        found = {name: row[0] for name, row in zip(names, rows, strict=True)}
    else:
        raise _unfit(path, f"{len(rows):,} lines for {len(names):,} pictures", "a line for each picture")
    if missing := [name for name in names if name not in found]:
        raise _unfit(path, f"no class for {missing[0]}" + _and_more(missing), "a line for each picture")
    found = _as_class_names(found, path, folder, is_position=bool(named), classes=classes)
    known = set(classes)
    if strange := [f"{name}: {found[name]}" for name in names if found[name] not in known]:
        raise _unfit(path, strange[0] + _and_more(strange), "the names of the class folders of train")
    return found


def _as_class_names(
    found: dict[str, str], path: Path, folder: Path, *, is_position: bool, classes: list[str]
) -> dict[str, str]:
    """Numbers become names: in a list with file names (Caffe's val.txt) they are positions in the sorted classes."""
    if not all(label.isdecimal() and len(label) < 10 for label in found.values()) or set(found.values()) <= set(
        classes
    ):
        return found
    if is_position:
        return {name: classes[int(label)] if int(label) < len(classes) else label for name, label in found.items()}
    numbers = _find(folder, (NUMBERS_OF_CLASSES,))
    if numbers is None:
        raise DataError(
            "the classes of this list are numbers of the development kit, which are not in the order of the folders",
            where=str(path),
            hint=f"put {NUMBERS_OF_CLASSES} of the development kit (lines: WNID NUMBER NAME) beside it",
        )
    names = {row[1]: row[0] for row in _rows(numbers) if len(row) > 1}
    return {name: names.get(label, label) for name, label in found.items()}


def _find(folder: Path, names: tuple[str, ...]) -> Path | None:
    """In the folder of the pictures, beside it, or at the top of Kaggle's copy."""
    root = folder.parent
    places = [folder, root] + (
        [root.parents[len(KAGGLE.parts) - 1]] if root.parts[-len(KAGGLE.parts) :] == KAGGLE.parts else []
    )
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def _rows(path: Path) -> Iterator[list[str]]:
    """The words of each line. Commas and tabs separate, too; the header of Kaggle's table is left out."""
    try:
        if path.stat().st_size > _MOST_LIST_BYTES:
            raise _unfit(path, f"{path.stat().st_size:,} bytes", f"at most {_MOST_LIST_BYTES:,}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise DataError("this list cannot be read", where=str(path), got=got, allowed="text in UTF-8") from error
    for number, line in enumerate(lines):
        words = line.replace(",", " ").split()
        if words and not (number == 0 and words[0] == "ImageId"):
            yield words


def _unfit(path: Path, got: str, allowed: str) -> DataError:
    return DataError("this list does not fit the pictures", where=str(path), got=got, allowed=allowed)


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1:,} more" if len(names) > 1 else ""


def flat_pictures(folder: Path) -> Path:
    """Where the pictures of a flat folder are."""
    return folder / FLAT_FOLDER if (folder / FLAT_FOLDER).is_dir() else folder


def is_list(name: str) -> bool:
    return os.path.basename(name) in (*LISTS, NUMBERS_OF_CLASSES)  # noqa: PTH119
