"""Parquet files of Hugging Face: a column of pictures (`image`: bytes and path) and a column `label`. No torch.

A row of a parquet file cannot be read alone: its column is compressed in pieces of many pictures. So the pictures are
copied once, one after the other, into a plain file in the cache. Without room for it, pictures are read from the piece
they are in, which is slow.
"""

from __future__ import annotations

import json
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO, Any

from paceline.data.archives.entries import NO_LABEL, ROW, Entries, check_picture_size, damaged_archive, row_name
from paceline.data.pack_format import crc32_of
from paceline.errors import DataError, UserError, printable_line
from paceline.settings.extras import how_to_install

_IMAGES = ("image", "img", "picture")
_LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
_BATCH_ROWS = 64
_LARGEST_TEXT = 200


def open_parquet(file: Any, where: str) -> Any:
    """pyarrow's reader. UserError without pyarrow, DataError for a file that is no parquet file."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        hint = how_to_install("parquet")
        raise UserError(
            "parquet files need the package pyarrow", where=where, got="not installed", hint=hint
        ) from error
    try:
        return parquet.ParquetFile(file)
    except DataError:  # of a store
        raise
    except Exception as error:  # pyarrow has its own classes for damaged files
        raise damaged_archive(where, _line(error)) from error


def index_parquet(
    file: Any,
    where: str,
    advance: Callable[[int], None] = lambda size: None,
    copy: IO[bytes] | None = None,
    *,
    is_test: bool = False,
) -> Entries:
    """Reads every row. `copy`: gets the pictures, one after the other. Skips a test file without any label."""
    source = open_parquet(file, where)
    image, label = _columns(source, where)
    found, place = Entries(classes=_class_names(source, label)), 0
    if is_test and not _has_labels(source, label, where):
        found.skip("without labels, as published test pictures often are", f"{source.metadata.num_rows:,} rows")
        return found
    paths: list[str] = []
    total = max(1, source.metadata.num_rows)
    size_bytes = sum(source.metadata.row_group(n).total_byte_size for n in range(source.metadata.num_row_groups))
    for row, (picture, path, value) in enumerate(_rows(source, image, label, where)):
        text = _label_text(value, f"{where}, row {row}")
        check_picture_size(len(picture), f"row {row}", where)
        found.add(b"", place, len(picture), row, ROW, crc32_of(picture))
        found.labels.append(text)
        paths.append(path)
        if copy is not None:
            copy.write(picture)
        place += len(picture)
        advance(size_bytes // total)
    found.names = [name.encode("utf-8", "surrogateescape") for name in _names(paths, where)]
    return found


def _names(paths: list[str], where: str) -> list[str]:
    """The names of the files that the pictures were made from, if they are different; else the numbers of rows."""
    names = [posixpath.basename(path.replace("\\", "/")) for path in paths]
    if all(names) and max(Counter(names).values(), default=1) == 1 and not any("\0" in name for name in names):
        return names
    return [row_name(where, row) for row in range(len(paths))]


def _columns(source: Any, where: str) -> tuple[str, str]:
    """The names of the columns of pictures and labels."""
    import pyarrow

    schema = source.schema_arrow
    kinds = pyarrow.types

    def is_picture(kind: Any) -> bool:
        if kinds.is_struct(kind):
            names = [kind.field(n).name for n in range(kind.num_fields)]
            return "bytes" in names and _is_bytes(kinds, kind.field("bytes").type)
        return bool(_is_bytes(kinds, kind))

    images = [name for name in schema.names if is_picture(schema.field(name).type)]
    image = next((name for name in _IMAGES if name in images), images[0] if len(images) == 1 else None)
    usable = [name for name in schema.names if _is_label(kinds, schema.field(name).type)]
    label = next((name for name in _LABELS if name in usable), None)
    if image is None or label is None:
        missing = "column of pictures" if image is None else "column of labels"
        raise DataError(
            f"this parquet file has no {missing}",
            where=where,
            got=", ".join(f"{name} ({schema.field(name).type})"[:60] for name in schema.names[:8]) or "no columns",
            allowed=f"image (struct of bytes and path, or binary), and one of {', '.join(_LABELS)} (number or text)",
        )
    return image, label


def _is_bytes(kinds: Any, kind: Any) -> bool:
    return bool(kinds.is_binary(kind) or kinds.is_large_binary(kind))


def _is_label(kinds: Any, kind: Any) -> bool:
    return bool(kinds.is_integer(kind) or kinds.is_string(kind) or kinds.is_large_string(kind))


def _has_labels(source: Any, label: str, where: str) -> bool:
    try:
        return any(
            value is not None and str(value) != NO_LABEL
            for batch in source.iter_batches(columns=[label])
            for value in batch.column(0).to_pylist()
        )
    except DataError:
        raise
    except Exception as error:
        raise damaged_archive(where, _line(error)) from error


def _rows(source: Any, image: str, label: str, where: str) -> Iterator[tuple[bytes, str, object]]:
    try:
        for batch in source.iter_batches(_BATCH_ROWS, columns=[image, label]):
            pictures = batch.column(batch.schema.get_field_index(image)).to_pylist()
            labels = batch.column(batch.schema.get_field_index(label)).to_pylist()
            for picture, value in zip(pictures, labels, strict=True):
                yield *_picture_of(picture), value
    except DataError:
        raise
    except Exception as error:  # pyarrow has its own classes for damaged files
        raise damaged_archive(where, _line(error)) from error


def _picture_of(cell: Any) -> tuple[bytes, str]:
    """The bytes and the path. An empty picture cannot be decoded later, and is counted as unreadable then."""
    if isinstance(cell, dict):
        return cell.get("bytes") or b"", str(cell.get("path") or "")
    return cell or b"", ""


def _label_text(value: object, where: str) -> bytes:
    text = "" if value is None else str(value)
    if not 0 < len(text) <= _LARGEST_TEXT or text == NO_LABEL:
        raise DataError("a picture has no label", where=where, got=printable_line(repr(value))[:80])
    return text.encode("utf-8", "surrogateescape")


def _class_names(source: Any, label: str) -> list[str] | None:
    """The names of numbered classes, which Hugging Face writes into the file."""
    try:
        text = (source.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        names = json.loads(text)["info"]["features"][label]["names"]
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_row_group(file: Any, where: str, row: int) -> tuple[int, list[bytes]]:
    """The pictures of the piece that holds a row, and the number of its first row."""
    source = open_parquet(file, where)
    image, _ = _columns(source, where)
    first = 0
    try:
        for group in range(source.metadata.num_row_groups):
            size = source.metadata.row_group(group).num_rows
            if row < first + size:
                cells = source.read_row_group(group, columns=[image]).column(image).to_pylist()
                return first, [_picture_of(cell)[0] for cell in cells]
            first += size
    except DataError:
        raise
    except Exception as error:
        raise damaged_archive(where, _line(error)) from error
    raise damaged_archive(where, f"it has no row {row:,}")


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
