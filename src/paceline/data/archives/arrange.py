"""Sorts the pictures of archives into parts and classes: by folders in the archives, or by their labels. No torch.

The part is the first folder, or a word of the archive's name (train-000.tar, pets-train-000.tar). Without parts, about
every fifth picture is kept for the test, by its name. Without test pictures, the validation pictures are the test ones.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from paceline.data.archives.entries import ROW, Entries, row_name
from paceline.data.parts import LAYOUT, TEST, TRAIN, VALIDATION, part_named
from paceline.data.picture_folder import is_name_kept_for_test
from paceline.errors import DataError, printable_line
from paceline.settings.text import check_text

_WORD = re.compile(r"[A-Za-z]+")
_FEW = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A picture of the data set."""

    name: bytes  # PART/CLASS/NAME, or CLASS/NAME without parts: as in a folder
    label: int
    file: int
    entry: int  # its number in the file


Rows = dict[str, list[Row]]


def arrange(
    files: list[str], entries: list[Entries], class_names: list[str] | None, where: str
) -> tuple[list[str], Rows, dict[str, str]]:
    """Classes, the pictures of each part, and the origin of each part."""
    used = [number for number, found in enumerate(entries) if found.names]
    if not used:
        raise DataError("there are no pictures in these archives", where=where, got=_some(files))
    labelled = [number for number in used if entries[number].labels]
    if labelled and len(labelled) < len(used):
        other = next(number for number in used if number not in labelled)
        raise DataError(
            "some archives have labels beside their pictures, and some have none",
            where=where,
            got=f"{files[labelled[0]]} has labels, {files[other]} has none",
        )
    if labelled:
        classes, placed = _by_labels(files, entries, used, class_names, where)
        placed = _number_rows(placed, files, entries)
    else:
        classes, placed = _by_folders(files, entries, used, where)
    for name in classes:
        check_text(name, "the name of a class", where=where)
    _require_two_classes(classes, where)
    rows = _as_parts(placed, where)
    _refuse_duplicates(rows, files, where)
    return classes, rows, _origins(rows, files)


def part_word(name: str) -> str:
    """The word for a part in the name of an archive: its folder, or a word of its name. Empty if there is none.

    Of several words the first counts if the name begins with it (`train-val.tar`); else they must be one part.
    """
    folder, base = posixpath.split(name)
    words = [word for word in _WORD.findall(base) if part_named(word)]
    if part_named(folder):
        return folder
    is_clear = words and (base.startswith(words[0]) or len({part_named(word) for word in words}) == 1)
    return words[0] if is_clear else ""


# --- By labels


def _by_labels(
    files: list[str], entries: list[Entries], used: list[int], class_names: list[str] | None, where: str
) -> tuple[list[str], dict[str, list[Row]]]:
    words = {number: part_word(files[number]) for number in used}
    parts = {number: part_named(word) or "" for number, word in words.items()}
    if "" in parts.values() and len(set(parts.values())) > 1:
        odd = next(files[number] for number in used if not parts[number])
        raise _unknown_part(odd, where)
    is_known = TRAIN in parts.values() or set(parts.values()) == {""}
    if not is_known:
        raise DataError("there are no training pictures", where=where, got=_some(files), allowed="train-*.tar")
    trained = [number for number in used if parts[number] in (TRAIN, "")]
    texts = {label for number in trained for label in entries[number].labels}
    declared = class_names or next((entries[number].classes for number in used if entries[number].classes), None)
    classes, numbers = _number_classes({text.decode() for text in texts}, declared, where)
    placed = defaultdict[str, list[Row]](list)
    for file in used:
        for entry, (name, text) in enumerate(zip(entries[file].names, entries[file].labels, strict=True)):
            label = numbers.get(text.decode())
            if label is None:
                raise DataError(
                    "a picture has a label that the training pictures do not have",
                    where=f"{where}: {files[file]}",
                    got=f"{printable_line(os.fsdecode(name))}: {printable_line(text.decode())}",
                    allowed=_some(classes),
                )
            short = _without(name, words[file].encode(), classes[label].encode())
            prefix = f"{words[file]}/" if words[file] else ""
            placed[parts[file]].append(Row(os.fsencode(f"{prefix}{classes[label]}/") + short, label, file, entry))
    return classes, placed


def _number_classes(texts: set[str], declared: list[str] | None, where: str) -> tuple[list[str], dict[str, int]]:
    """Class names, and the class of each label. Numbers keep their order; names are sorted, as folders are."""
    if not all(text.isdecimal() and len(text) < 10 for text in texts):
        names = declared if declared and texts <= set(declared) else sorted(texts)
        return names, {name: number for number, name in enumerate(names)}
    values = sorted({int(text) for text in texts})
    if declared is None:
        numbers = {value: place for place, value in enumerate(values)}
        names = [str(value) for value in values]
    elif values[-1] >= len(declared):
        raise DataError(
            "a label has no class name",
            where=where,
            got=f"label {values[-1]}, and {len(declared)} names",
            allowed=f"0 to {len(declared) - 1}",
        )
    else:
        numbers = {number: number for number in range(len(declared))}
        names = declared
    by_text = {text: numbers[int(text)] for text in texts}  # also 007
    return names, by_text | {str(value): place for value, place in numbers.items()}


def _number_rows(placed: dict[str, list[Row]], files: list[str], entries: list[Entries]) -> dict[str, list[Row]]:
    """Name pictures by their rows if parquet files repeat names for different pictures."""
    seen: dict[bytes, int] = {}
    is_repeated = False
    for row in (row for part in placed.values() for row in part):
        found = entries[row.file]
        if found.methods[row.entry] != ROW or seen.get(row.name) == found.crcs[row.entry]:
            return placed
        is_repeated = is_repeated or row.name in seen
        seen[row.name] = found.crcs[row.entry]
    if not is_repeated:
        return placed

    def numbered(row: Row) -> Row:
        folder, _, _ = row.name.rpartition(b"/")
        name = row_name(files[row.file], entries[row.file].stored[row.entry])
        return replace(row, name=folder + b"/" + os.fsencode(name))

    return {part: [numbered(row) for row in rows] for part, rows in placed.items()}


def _without(name: bytes, *folders: bytes) -> bytes:
    """A name without these folders at its beginning: labels say the same."""
    for folder in folders:
        name = name.removeprefix(folder + b"/") if folder else name
    return name


# --- By folders


def _by_folders(
    files: list[str], entries: list[Entries], used: list[int], where: str
) -> tuple[list[str], dict[str, list[Row]]]:
    split = {number: [name.split(b"/") for name in entries[number].names] for number in used}
    _strip_common_folder(split)
    found = defaultdict[str, list[tuple[bytes, bytes, list[bytes], int, int]]](list)
    has_inner_parts = all(part_named(os.fsdecode(words[0])) for number in used for words in split[number])
    for file in used:
        outer = part_word(files[file])
        for entry, words in enumerate(split[file]):
            first = os.fsdecode(words[0])
            # In train.tar, a folder train is the part. A folder val in it could be a class.
            has_inner = has_inner_parts or (outer != "" and part_named(first) == part_named(outer))
            word, rest = (first, words[1:]) if has_inner else (outer, words)
            if len(rest) < 2:
                raise DataError(
                    "a picture is in no class folder",
                    where=f"{where}: {files[file]}",
                    got=printable_line(os.fsdecode(entries[file].names[entry])),
                    allowed=f"{LAYOUT} in the archive, or KEY.jpg beside KEY.cls",
                )
            found[part_named(word) or ""].append((os.fsencode(word), rest[0], rest[1:], file, entry))
    if "" in found and len(found) > 1:
        raise _unknown_part(files[found[""][0][3]], where)
    if TRAIN not in found and "" not in found:
        raise DataError("there are no training pictures", where=where, got=_some(files), allowed=LAYOUT)
    trained = found[TRAIN] if TRAIN in found else found[""]
    classes = sorted({os.fsdecode(label) for _, label, *_ in trained})
    numbers = {os.fsencode(name): number for number, name in enumerate(classes)}
    for part, pictures in found.items():
        _require_same_classes({label for _, label, *_ in pictures}, set(numbers), part, where)
    placed = {
        part: [
            Row(b"/".join([word, label, *rest] if word else [label, *rest]), numbers[label], file, entry)
            for word, label, rest, file, entry in pictures
        ]
        for part, pictures in found.items()
    }
    return classes, placed


def _strip_common_folder(split: dict[int, list[list[bytes]]]) -> None:
    """Archives often hold one folder with everything in it."""
    while True:
        first = {words[0] for names in split.values() for words in names}
        shortest = min(len(words) for names in split.values() for words in names)
        if len(first) > 1 or shortest < 3 or part_named(os.fsdecode(next(iter(first)))):
            return
        for names in split.values():
            for words in names:
                del words[0]


def _require_same_classes(found: set[bytes], trained: set[bytes], part: str, where: str) -> None:
    if found != trained:
        only = [f"{os.fsdecode(name)}: only in train" for name in sorted(trained - found)]
        only += [f"{os.fsdecode(name)}: only in {part}" for name in sorted(found - trained)]
        raise DataError(f"train and {part} do not hold the same classes", where=where, got=printable_line(_some(only)))


# --- Both


def _as_parts(placed: dict[str, list[Row]], where: str) -> Rows:
    if "" in placed:
        kept = [row for row in placed[""] if not is_name_kept_for_test(row.name)]
        held = [row for row in placed[""] if is_name_kept_for_test(row.name)]
        if not held or len({row.label for row in kept}) < len({row.label for row in placed[""]}):
            raise DataError(
                "there are too few pictures to split off a test set",
                where=where,
                got=f"{len(placed[''])} pictures",
                hint="add pictures, or make archives for train and test",
            )
        return {TRAIN: kept, TEST: held}
    rows = dict(placed)
    if TEST not in rows and VALIDATION in rows:
        rows[TEST] = rows.pop(VALIDATION)
    if TEST not in rows:
        raise DataError(
            "there are training pictures but no test pictures",
            where=where,
            got=f"{len(rows[TRAIN])} training pictures",
            allowed="archives with train and test (also val) in their names, or these folders inside",
        )
    return rows


def _refuse_duplicates(rows: Rows, files: list[str], where: str) -> None:
    for part in rows.values():
        names = Counter(row.name for row in part)
        if len(names) < len(part):
            name = next(name for name, count in names.items() if count > 1)
            places = [files[row.file] for row in part if row.name == name]
            raise DataError(
                "two pictures have the same name",
                where=where,
                got=f"{printable_line(os.fsdecode(name))} in {' and in '.join(places[:2])}",
                hint="is one of the archives a copy of another?",
            )


def _require_two_classes(classes: list[str], where: str) -> None:
    if len(classes) < 2:
        raise DataError(
            "there are too few classes", where=where, got=", ".join(classes) or "none", allowed="two or more"
        )


def _origins(rows: Rows, files: list[str]) -> dict[str, str]:
    origins = {}
    for part, pictures in rows.items():
        used = sorted({row.file for row in pictures})
        folder = os.fsdecode(pictures[0].name.split(b"/")[0])
        inside = f": {folder}/" if part_named(folder) and not part_word(files[used[0]]) else ""
        origins[part] = files[used[0]] + (f" and {len(used) - 1:,} more" if used[1:] else "") + inside
    return origins


def _unknown_part(name: str, where: str) -> DataError:
    return DataError(
        "the name of an archive says no part of the data",
        where=where,
        got=name,
        allowed="names with one of the words train, val, valid, validation or test",
        hint="rename it, or move it away",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW:,} more" if len(names) > _FEW else "")
