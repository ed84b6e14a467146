"""Reads small untrusted YAML and JSON files: bounded in size and depth, and without YAML aliases.

A recipe, a site file, status.json or notes.json may come from another person. A few hundred bytes of nested aliases
describe billions of nodes, and deep nesting overflows the stack. Every reader here raises only OSError or ValueError.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError

if TYPE_CHECKING:
    import yaml

LARGEST_YAML_BYTES = 200_000
LARGEST_JSON_BYTES = 20_000_000
_DEEPEST_YAML = 10
_DEEPEST_JSON = 50
_MOST_DIGITS = 20  # of a whole number of 64 bits, with its sign
_CHUNK_BYTES = 1 << 16


class YamlError(ValueError):
    """The text is not YAML that we accept; `line` counts from 1, 0 if it is not known."""

    def __init__(self, problem: str, line: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line

    def place(self, path: Path) -> str:
        return f"{path}, line {self.line}" if self.line else str(path)


def compose_yaml(path: Path) -> yaml.Node | None:
    """The nodes of a file, not constructed: every scalar stays the text in the file. None for an empty file."""
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise YamlError("anchors and aliases are not allowed", event.start_mark.line + 1)
            if self.depth >= _DEEPEST_YAML:
                raise YamlError("nested too deeply", event.start_mark.line + 1)
            self.depth += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

    try:
        text = read_small(path, LARGEST_YAML_BYTES).decode()
        root: yaml.Node | None = yaml.compose(text, Loader=Loader)
        return root
    except UnicodeDecodeError as error:
        raise YamlError(f"it is not UTF-8 text at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise YamlError(error.problem or "it cannot be read as YAML", line) from error
    except yaml.YAMLError as error:  # a control character, for example
        raise YamlError(str(error).splitlines()[0]) from error
    except YamlError:
        raise
    except ValueError as error:
        raise YamlError(str(error)) from error
    except (RecursionError, IndexError, AttributeError, TypeError) as error:
        # The parser itself raises these for some malformed texts.
        raise YamlError("it cannot be read as YAML") from error


def parse_json(text: str | bytes, *, allows_raw_bytes: bool = False) -> Any:
    """Any JSON value. ValueError for malformed text, deep nesting, too large numbers and lone surrogates.

    `allows_raw_bytes`: accept file names that are not UTF-8, which Python represents with lone surrogates.
    """
    try:
        value = json.loads(text, parse_int=_parse_whole)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _is_deeper(value, _DEEPEST_JSON):
        raise ValueError("nested too deeply")
    if _has_escaped_surrogate(text) and not allows_raw_bytes:  # a lone surrogate can be neither printed nor written
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _parse_whole(digits: str) -> int:
    """No size, step or time needs more than 64 bits. As a float a longer number could overflow."""
    if len(digits) > _MOST_DIGITS or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("a number is too large")
    return number


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        values = (item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list))
        layer = [inner for items in values for inner in items if isinstance(inner, dict | list)]
        if not layer:
            return False
    return True


def _has_escaped_surrogate(text: bytes | str) -> bool:
    return b"\\ud" in text.lower() if isinstance(text, bytes) else "\\ud" in text.lower()


def read_json_value(path: Path, at_most_bytes: int = LARGEST_JSON_BYTES) -> Any:
    return parse_json(read_small(path, at_most_bytes))


def read_json_object(path: Path, at_most_bytes: int = LARGEST_JSON_BYTES) -> dict[str, Any]:
    """The object in a file."""
    content = read_json_value(path, at_most_bytes)
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}, not an object")
    return content


def read_small(path: Path, at_most_bytes: int, *, follows_links: bool = True) -> bytes:
    """The content of a regular file. ValueError for other kinds of files, and for larger files.

    A file that the user names may be a link. A file in a run folder may not: it could expose any file of this machine.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > at_most_bytes:
            raise ValueError(f"larger than {at_most_bytes:,} bytes")
        content = bytearray()
        while chunk := os.read(descriptor, _CHUNK_BYTES):  # a file of /proc has no size, and a file may grow
            content += chunk
            if len(content) > at_most_bytes:
                raise ValueError(f"larger than {at_most_bytes:,} bytes")
        return bytes(content)
    finally:
        os.close(descriptor)


def open_plain(path: Path | str, flags: int) -> int:
    """A descriptor for writing a regular file of a run folder. Creates the file if it does not exist.

    Another person may have put a link or a FIFO in its place. A link could change any file of this user, and a FIFO
    would block until a reader opens it. Both are a UserError.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise not_plain(Path(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_plain(Path(path))
    return descriptor


def write_plain(path: Path, content: bytes, *, appends: bool = False) -> None:
    """Replace the bytes of a regular file of a run folder in place, or append to them. Creates a missing file."""
    descriptor = open_plain(path, os.O_WRONLY | (os.O_APPEND if appends else os.O_TRUNC))
    try:
        write_all(descriptor, memoryview(content))
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write everything: `os.write` may write less, for example near a full disk."""
    while data:
        data = data[os.write(descriptor, data) :]


def make_plain_folder(path: Path) -> None:
    """Create a folder in a run folder; it may exist. A link to another folder is a UserError."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise not_plain(path)


def not_plain(path: Path) -> UserError:
    return UserError(
        "this file in the run folder cannot be written: it is a link, or not a plain file",
        where=str(path),
        hint="remove it, or give another --output-dir",
    )
