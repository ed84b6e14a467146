"""Pictures that CSV files list: which files, with which labels, in which part. Opens no picture. Imports no torch.

DATA_DIR holds train.csv and test.csv, with or without val.csv, or labels.csv alone, of which about every fifth picture
is kept for the test. The columns are path (relative to DATA_DIR), label, and optionally weight. Several labels, or
several numbers of a regression, are separated by semicolons.
"""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.data.parts import NAMES, TABLE_ALONE, TABLE_LAYOUT, TEST, TRAIN
from paceline.data.picture_folder import is_kept_for_test
from paceline.data.pictures import EXTENSIONS
from paceline.errors import DataError
from paceline.settings.tasks import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from paceline.settings.text import check_text

SEPARATOR = ";"
_PATH, _LABEL, _WEIGHT = "path", "label", "weight"
_MOST_LINES = 3
LARGEST_FLOAT32 = 3.4e38


@dataclass(frozen=True)
class Listed:
    """One picture of a table."""

    path: Path
    labels: tuple[str, ...]
    weight: float | None
    where: str  # file and line


@dataclass(frozen=True)
class PictureTable:
    """All pictures that the CSV files of a folder list."""

    root: Path
    classes: tuple[str, ...]  # of a regression: the names of its numbers
    parts: dict[str, list[Listed]]
    files: dict[str, str]  # the name of each part's CSV file


def read_tables(root: Path, task: str) -> PictureTable:
    """Raises DataError for the first mistakes: a missing file, a missing label, a label that is no number."""
    files = _find_files(root)
    parts = {part: _read_table(root / name, root, task) for part, name in files.items()}
    if list(files) == [TRAIN]:
        parts = _split_test(parts[TRAIN], root)
        files = dict.fromkeys(parts, TABLE_ALONE)
    _require_files(parts)
    classes = _number_names(parts) if task == REGRESSION else _class_names(parts, root)
    return PictureTable(root, classes, parts, files)


def _find_files(root: Path) -> dict[str, str]:
    """The CSV file of each part. Only the training part: labels.csv, which is split."""
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_file())
    except OSError as error:
        raise DataError("this folder cannot be read", where=str(root), got=error.strerror) from error
    found = {part: [name for name in names if name in {f"{word}.csv" for word in NAMES[part]}] for part in NAMES}
    if not found[TRAIN] and TABLE_ALONE in names:
        return {TRAIN: TABLE_ALONE}
    if not found[TRAIN] or not found[TEST] or any(len(same) > 1 for same in found.values()):
        tables = [name for name in names if name.endswith(".csv")]
        raise DataError(
            "the tables of a data set are not here",
            where=str(root.absolute()),
            got=", ".join(tables[:8]) or "no .csv file",
            allowed=TABLE_LAYOUT,
        )
    return {part: same[0] for part, same in found.items() if same}


def _read_table(file: Path, root: Path, task: str) -> list[Listed]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.DictReader(stream)
            missing = [name for name in (_PATH, _LABEL) if name not in (rows.fieldnames or ())]
            if missing:
                raise DataError(
                    f"the table has no column {' and no column '.join(missing)}",
                    where=f"{file}, line 1",
                    got=", ".join(map(str, rows.fieldnames or ())) or "an empty file",
                    allowed="a first line with path,label, and weight if samples have weights",
                )
            listed = [_read_row(row, root, task, f"{file}, line {rows.line_num}") for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise DataError("the table cannot be read", where=str(file), got=got, allowed="CSV in UTF-8") from error
    if not listed:
        raise DataError("the table lists no pictures", where=str(file))
    seen: dict[Path, str] = {}
    for item in listed:
        if item.path in seen:
            raise DataError(
                "the table lists a picture twice",
                where=item.where,
                got=f"{item.path}, also in {seen[item.path]}",
                hint=f"several labels are one cell, separated by {SEPARATOR!r}",
            )
        seen[item.path] = item.where
    return listed


def _read_row(row: dict[str, str | None], root: Path, task: str, where: str) -> Listed:
    path, label, weight = ((row.get(name) or "").strip() for name in (_PATH, _LABEL, _WEIGHT))
    if not path:
        raise DataError("a picture has no path", where=where)
    labels = tuple(part.strip() for part in label.split(SEPARATOR)) if task != SINGLE_LABEL else (label,)
    if task == MULTI_LABEL and label == "":
        labels = ()
    if "" in labels:
        hint = "an empty cell is allowed with --task multi-label only" if not label else ""
        raise DataError("a picture has no label", where=where, got=path, hint=hint or None)
    if task == REGRESSION and not all(_is_number(text) for text in labels):
        raise DataError("a label is no number", where=where, got=label, allowed=f"numbers, separated by {SEPARATOR!r}")
    if task == REGRESSION and any(abs(float(text)) > LARGEST_FLOAT32 for text in labels):
        raise DataError(
            "a label is too large for training",
            where=where,
            got=label,
            allowed=f"up to {LARGEST_FLOAT32:.1e} (float32)",
            hint="scale the labels to about -1 to 1",
        )
    if weight and not _is_number(weight):
        raise DataError("a weight is no number", where=where, got=weight)
    if not Path(os.path.normpath(root / path)).is_relative_to(os.path.normpath(root)):
        raise DataError(
            "a picture is outside of the data folder", where=where, got=path, allowed=f"a path below {root}"
        )
    return Listed(root / path, labels, float(weight) if weight else None, where)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _split_test(listed: list[Listed], root: Path) -> dict[str, list[Listed]]:
    is_test = [is_kept_for_test(item.path, root) for item in listed]
    parts = {
        TRAIN: [item for item, is_held in zip(listed, is_test, strict=True) if not is_held],
        TEST: [item for item, is_held in zip(listed, is_test, strict=True) if is_held],
    }
    if not all(parts.values()):
        raise DataError(
            "there are too few pictures to split off a test set",
            where=str(root / TABLE_ALONE),
            got=f"{len(listed)} pictures",
            hint="add pictures, or write train.csv and test.csv yourself",
        )
    return parts


def _require_files(parts: dict[str, list[Listed]]) -> None:
    """Every picture must exist. Folders are listed once: on network storage each file would cost a round trip."""

    @cache
    def names_in(folder: Path) -> frozenset[str]:
        try:
            return frozenset(entry.name for entry in os.scandir(folder))
        except OSError:
            return frozenset()

    listed = [item for part in parts.values() for item in part]
    missing = [item for item in listed if item.path.name not in names_in(item.path.parent)]
    if missing:
        lines = [f"{item.where}: {item.path}" for item in missing[:_MOST_LINES]]
        more = len(missing) - len(lines)
        raise DataError(
            "the table lists pictures that do not exist",
            where=missing[0].where,
            got="\n".join(lines) + (f"\nand {more:,} more" if more else ""),
            hint="paths are relative to --data-dir",
        )
    for item in listed:
        if item.path.suffix.lower() not in EXTENSIONS:
            raise DataError(
                "this is not the name of a picture that is read",
                where=item.where,
                got=item.path.name,
                allowed=", ".join(sorted(EXTENSIONS)),
            )


def _class_names(parts: dict[str, list[Listed]], root: Path) -> tuple[str, ...]:
    """The labels of the training part, sorted."""
    names = sorted({label for item in parts[TRAIN] for label in item.labels})
    for name in names:
        check_text(name, "the name of a class", where=str(root))
    if len(names) < 2:
        raise DataError(
            "there are too few classes in the training part",
            where=parts[TRAIN][0].where.partition(",")[0],
            got=", ".join(names) or "no labels",
            allowed="two or more",
        )
    known = set(names)
    for part, listed in parts.items():
        for item in listed:
            if unknown := [label for label in item.labels if label not in known]:
                raise DataError(
                    f"a label of the {part} part does not occur in the training part",
                    where=item.where,
                    got=unknown[0],
                    allowed=", ".join(names[:8]) + (", ..." if len(names) > 8 else ""),
                )
    return tuple(names)


def _number_names(parts: dict[str, list[Listed]]) -> tuple[str, ...]:
    count = len(parts[TRAIN][0].labels)
    for listed in parts.values():
        for item in listed:
            if len(item.labels) != count:
                raise DataError(
                    "pictures have different numbers of values",
                    where=item.where,
                    got=f"{len(item.labels)} values",
                    allowed=f"{count}, as the first picture has",
                )
    return number_names(count)


def number_names(count: int) -> tuple[str, ...]:
    """The names of the numbers that a regression gives."""
    return ("target",) if count == 1 else tuple(f"target-{number}" for number in range(1, count + 1))
