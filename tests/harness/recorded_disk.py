"""Record every change that code in this process makes below a folder, in order, with every fsync.

The functions of `os` and `open` are replaced during a recording. `replay` of the whole record must give the actual
folder, and a test compares the record with the output of strace. A call that would change files and is not modelled
here raises. Reads are not recorded.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Inode = int
# The content of a path: None for a folder, bytes for a file, text for the target of a link.
Content = bytes | str | None
Tree = dict[str, Content]
_NOT_MODELLED = (
    *("pwrite", "pwritev", "writev", "copy_file_range", "splice", "posix_fallocate"),
    *("truncate", "mknod", "mkfifo"),
)


@dataclass(frozen=True)
class Entries:
    """Names change in one atomic step: create, mkdir, symlink, link, unlink, rmdir or rename."""

    call: str
    changes: tuple[tuple[Inode, str, Inode | None], ...]  # folder, name, new inode

    def __str__(self) -> str:
        return f"{self.call} {' '.join(name for _, name, _ in self.changes)}"


@dataclass(frozen=True)
class Write:
    inode: Inode
    offset: int
    data: bytes

    def __str__(self) -> str:
        return f"write {len(self.data)} bytes"


@dataclass(frozen=True)
class Truncate:
    inode: Inode
    size: int

    def __str__(self) -> str:
        return f"truncate to {self.size} bytes"


@dataclass(frozen=True)
class Sync:
    """fsync of a file or a folder."""

    inode: Inode

    def __str__(self) -> str:
        return "fsync"


@dataclass(frozen=True)
class Mark:
    """A report by the code under test at this point, such as a finished save."""

    what: str
    value: Any

    def __str__(self) -> str:
        return f"reported: {self.what} {self.value}"


@dataclass(frozen=True)
class StoreChange:
    """An object in a store is replaced or removed: atomic, and durable when the call returns."""

    name: str
    data: bytes | None

    def __str__(self) -> str:
        return f"store {'remove' if self.data is None else 'put'} {self.name}"


Operation = Entries | Write | Truncate | Sync | Mark | StoreChange


@dataclass
class Record:
    """The initial state of a folder (all of it durable), and the operations since."""

    root: Inode
    names: dict[Inode, str]  # the first path of an inode, for messages
    folders: dict[Inode, dict[str, Inode]]  # at the start
    files: dict[Inode, bytes]  # at the start
    links: dict[Inode, str]
    store: dict[str, bytes]  # at the start
    kinds: dict[Inode, str] = field(default_factory=dict)  # folder, file or link, of every inode
    operations: list[Operation] = field(default_factory=list)

    def describe(self, operation: Operation) -> str:
        inode = getattr(operation, "inode", None)
        return f"{operation} {self.names[inode]}" if inode is not None else str(operation)

    def without(self, *indexes: int) -> Record:
        """The record without these calls."""
        kept = [operation for index, operation in enumerate(self.operations) if index not in indexes]
        return Record(
            self.root, self.names, self.folders, self.files, self.links, self.store, self.kinds, operations=kept
        )


def read_tree(root: Path) -> Tree:
    tree: Tree = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        tree[name] = str(path.readlink()) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return tree


class Recorder:
    """Makes the record. The disk may reuse inode numbers, so each file gets its own number."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in _PATCHED}
        self._real_open = io.open
        self._inodes: dict[int, Inode] = {}
        self._next = 0
        self.record = self._snapshot()

    def mark(self, what: str, value: Any = None) -> None:
        with self._lock:
            self.record.operations.append(Mark(what, value))

    def store_changed(self, name: str, data: bytes | None) -> None:
        with self._lock:
            self.record.operations.append(StoreChange(name, data))

    # --- Paths of operations

    def _snapshot(self) -> Record:
        record = Record(0, {}, {}, {}, {}, {})
        record.root = self._new_inode(record, self.root, "folder")
        for path in [self.root, *sorted(self.root.rglob("*"))]:
            kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
            inode = record.root if path == self.root else self._inodes.get(path.lstat().st_ino)
            inode = self._new_inode(record, path, kind) if inode is None else inode
            if kind == "folder":
                record.folders.setdefault(inode, {})
            elif kind == "file":
                record.files[inode] = path.read_bytes()
            if path != self.root:
                record.folders[self._inodes[path.parent.stat().st_ino]][path.name] = inode
        return record

    def _new_inode(self, record: Record, path: Path, kind: str) -> Inode:
        self._next += 1
        self._inodes[path.lstat().st_ino] = self._next
        record.names[self._next] = str(path.relative_to(self.root))
        record.kinds[self._next] = kind
        if kind == "link":
            record.links[self._next] = str(path.readlink())
        return self._next

    def _locate(self, path: Any, dir_fd: int | None = None) -> Path | None:
        """A path below the root, with all links resolved except the last part; None if it is outside."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)  # noqa: PTH118, PTH115
        found = Path(os.path.realpath(os.path.dirname(os.path.abspath(text)))) / os.path.basename(text)  # noqa: PTH100, PTH119, PTH120
        return found if found.is_relative_to(self.root) and found != self.root else None

    def _inode_of(self, descriptor: int) -> Inode | None:
        """None for a file outside of the root."""
        path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")  # noqa: PTH115
        return self._inodes[os.fstat(descriptor).st_ino] if Path(path).is_relative_to(self.root) else None

    def _folder_of(self, path: Path) -> Inode:
        return self._inodes[path.parent.stat().st_ino]

    def _add(self, operation: Operation) -> None:
        self.record.operations.append(operation)

    def _added(self, call: str, path: Path, kind: str) -> None:
        inode = self._new_inode(self.record, path, kind)
        self._add(Entries(call, ((self._folder_of(path), path.name, inode),)))

    # --- Replacements of the functions of os

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor: int = self._opened(
            self._locate(path, dir_fd),
            is_creating=bool(flags & os.O_CREAT),
            is_truncating=bool(flags & os.O_TRUNC),
            action=lambda: self._real["open"](path, flags, mode, dir_fd=dir_fd),
        )
        return descriptor

    def _opened(self, path: Path | None, *, is_creating: bool, is_truncating: bool, action: Callable[[], Any]) -> Any:
        with self._lock:
            is_there = path is not None and path.exists()
            size = path.stat().st_size if path is not None and is_there else 0
            result = action()
            if path is not None and is_creating and not is_there:
                self._added("create", path, "file")
            elif path is not None and is_truncating and size:
                self._add(Truncate(self._inodes[path.stat().st_ino], 0))
            return result

    def write(self, descriptor: int, data: Any) -> int:
        return self.wrote(descriptor, data, lambda: self._real["write"](descriptor, data))

    def wrote(self, descriptor: int, data: Any, action: Callable[[], int]) -> int:
        with self._lock:
            count = action()
            if os.isatty(descriptor) or not os.path.isfile(f"/proc/self/fd/{descriptor}"):  # noqa: PTH113
                return count
            inode = self._inode_of(descriptor)
            if inode is not None and count:
                offset = os.lseek(descriptor, 0, os.SEEK_CUR) - count
                self._add(Write(inode, offset, bytes(memoryview(data).cast("B")[:count])))
            return count

    def sendfile(self, out: int, source: int, offset: int | None, count: int, *rest: Any) -> int:
        inode = self._inode_of(out)
        if inode is None:
            return int(self._real["sendfile"](out, source, offset, count, *rest))
        if offset is None:
            raise NotImplementedError("sendfile from the current position is not modelled")
        return self.write(out, os.pread(source, count, offset))

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            self._real["fsync"](descriptor)
            inode = self._inode_of(descriptor)
            if inode is not None:
                self._add(Sync(inode))

    def ftruncate(self, descriptor: int, size: int) -> None:
        with self._lock:
            self._real["ftruncate"](descriptor, size)
            inode = self._inode_of(descriptor)
            if inode is not None:
                self._add(Truncate(inode, size))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._made("mkdir", path, dir_fd, "folder", lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd))

    def symlink(self, target: Any, path: Any, is_folder: bool = False, *, dir_fd: int | None = None) -> None:
        self._made("symlink", path, dir_fd, "link", lambda: self._real["symlink"](target, path, dir_fd=dir_fd))

    def _made(self, call: str, path: Any, dir_fd: int | None, kind: str, action: Callable[[], Any]) -> None:
        with self._lock:
            found = self._locate(path, dir_fd)
            action()
            if found is not None:
                self._added(call, found, kind)

    def link(self, source: Any, path: Any, **options: Any) -> None:
        with self._lock:
            self._real["link"](source, path, **options)
            found = self._locate(path, options.get("dst_dir_fd"))
            if found is not None:
                inode = self._inodes[found.stat().st_ino]
                self._add(Entries("link", ((self._folder_of(found), found.name, inode),)))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("rmdir", path, dir_fd)

    def _removed(self, call: str, path: Any, dir_fd: int | None) -> None:
        with self._lock:
            found = self._locate(path, dir_fd)
            self._real[call](path, dir_fd=dir_fd)
            if found is not None:
                self._add(Entries(call, ((self._folder_of(found), found.name, None),)))

    def rename(self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with self._lock:
            old, new = self._locate(source, src_dir_fd), self._locate(target, dst_dir_fd)
            if (old is None) != (new is None):
                raise NotImplementedError("a rename into or out of the recorded folder is not modelled")
            self._real["rename"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if old is not None and new is not None:
                inode = self._inodes[new.lstat().st_ino]
                gone, here = (self._folder_of(old), old.name, None), (self._folder_of(new), new.name, inode)
                self._add(Entries("rename", (gone, here)))

    # --- Replacements of open

    def open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        is_inside = not isinstance(file, int) and self._locate(file) is not None
        if not is_inside or not set(mode) & set("wax+"):
            return self._real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = self._opened(
            self._locate(file),
            is_creating=not mode.startswith("r"),
            is_truncating=mode.startswith("w"),
            action=lambda: _RecordedFile(self, file, mode.replace("b", "").replace("t", ""), closefd, opener),
        )
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


class _RecordedFile(io.FileIO):
    def __init__(self, recorder: Recorder, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorder = recorder

    def write(self, data: Any) -> int:
        return self._recorder.wrote(self.fileno(), data, lambda: super(_RecordedFile, self).write(data))

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        self._recorder.ftruncate(self.fileno(), size)
        return size


_PATCHED = {
    **{name: name for name in ("open", "write", "sendfile", "fsync", "ftruncate", "mkdir", "symlink", "link")},
    **{"unlink": "unlink", "remove": "unlink", "rmdir": "rmdir", "rename": "rename", "replace": "rename"},
    "fdatasync": "fsync",
}


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Record the changes of this process below a folder. At the end, check that the record is complete."""
    recorder = Recorder(root)
    replaced = {name: getattr(os, name) for name in (*_PATCHED, *_NOT_MODELLED)}
    try:
        for name, method in _PATCHED.items():
            setattr(os, name, getattr(recorder, method))
        for name in _NOT_MODELLED:
            setattr(os, name, _refused)
        io.open = builtins.open = recorder.open_file  # type: ignore[assignment]
        yield recorder
    finally:
        io.open = builtins.open = recorder._real_open
        for name, function in replaced.items():
            setattr(os, name, function)


def _refused(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError("a call that may change files is not modelled")
