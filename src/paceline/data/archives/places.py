"""Where data files are: a folder of this machine (also on NFS). Lists archives and reads ranges of them. No torch."""

from __future__ import annotations

import os
import posixpath
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from paceline.data.parts import hidden_reason, part_named
from paceline.errors import DataError, UnavailableData, UserError

TAR, ZIP, PARQUET = KINDS = ("tar", "zip", "parquet")
_COMPRESSED_TAR = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_DATA_FOLDER = "data"  # of a repository of Hugging Face
CLASS_NAMES = "classes.txt"  # beside archives with numbered labels: a name per line
_MOST_OPEN_FILES = 256
_LARGEST_SIDE_FILE_BYTES = 2**24


@dataclass(frozen=True)
class DataFile:
    name: str  # relative to its place
    size_bytes: int
    version: str  # changes with the content: the time of the last change, or the tag of a store

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2].lower()


class Place(Protocol):
    """Holds data files. Safe to use from several threads."""

    name: str  # for people, and part of the names of indexes

    def list(self) -> list[DataFile]:
        """The archives, sorted by name."""
        ...

    def where(self, name: str) -> str:
        """The path or URL of a file, for messages."""
        ...

    def open(self, file: DataFile) -> IO[bytes]: ...

    def read_range(self, file: DataFile, start: int, size: int) -> bytes:
        """OSError, or UnavailableData if the file has changed. Shorter than `size` at the end of the file."""
        ...

    def read_side_file(self, name: str) -> bytes | None:
        """A small file beside the archives."""
        ...


def is_archive(name: str) -> bool:
    return name.rpartition(".")[2].lower() in KINDS and not hidden_reason(posixpath.basename(name))


def choose_archives(names: list[str], folders_below: dict[str, bool]) -> list[str]:
    """The archives of a data set. None if the folder holds class folders: then archives beside them are not used.

    `names`: relative, with at most one folder. `folders_below`: each folder, and whether it has further folders in it.
    """
    kept = [name for name in names if is_archive(name)]
    others = [name for name in folders_below if not (part_named(name) or name == _DATA_FOLDER or hidden_reason(name))]
    has_classes = len(others) > 1 or any(is_deep for name, is_deep in folders_below.items() if part_named(name))
    used = {"", _DATA_FOLDER} | {folder for folder in folders_below if part_named(folder)}
    return [] if has_classes else sorted(name for name in kept if posixpath.dirname(name) in used)


class LocalPlace:
    """A folder, or one archive."""

    def __init__(self, path: Path) -> None:
        self.name = str(path.absolute())
        self._only = path.name if not path.is_dir() else ""
        self._root = path.parent if self._only else path
        self._open_files: dict[str, int] = {}
        self._lock = threading.Lock()

    def list(self) -> list[DataFile]:
        return [self._describe(name) for name in ([self._only] if self._only else _archives_in(self._root))]

    def _describe(self, name: str) -> DataFile:
        try:
            found = (self._root / name).stat()
        except OSError as error:
            raise DataError("this file cannot be read", where=str(self._root / name), got=error.strerror) from error
        if not stat.S_ISREG(found.st_mode):  # opening a FIFO would wait for a writer
            raise DataError("this is not a regular file", where=str(self._root / name))
        return _data_file(name, found)

    def path_of(self, file: DataFile) -> Path:
        return self._root / file.name

    def where(self, name: str) -> str:
        return str((self._root / name).absolute())

    def open(self, file: DataFile) -> IO[bytes]:
        return self.path_of(file).open("rb")

    def read_range(self, file: DataFile, start: int, size: int) -> bytes:
        descriptor = self._open_files.get(file.name)
        if descriptor is not None:
            return read_at(descriptor, start, size)
        # Files stay open: on NFS each open is a round trip. None is closed while another thread may read it.
        descriptor = self._open_unchanged(file)
        with self._lock:
            is_kept = file.name not in self._open_files and len(self._open_files) < _MOST_OPEN_FILES
            if is_kept:
                self._open_files[file.name] = descriptor
        try:
            return read_at(descriptor, start, size)
        finally:
            if not is_kept:
                os.close(descriptor)

    def _open_unchanged(self, file: DataFile) -> int:
        """UnavailableData for another file of this name: the index would find other pictures in it, or pieces."""
        descriptor = os.open(self.path_of(file), os.O_RDONLY | os.O_CLOEXEC)
        if _data_file(file.name, os.fstat(descriptor)) != file:
            os.close(descriptor)
            raise UnavailableData(
                "this archive has changed since it was indexed",
                where=self.where(file.name),
                hint="the next start indexes it again",
            )
        return descriptor

    def read_side_file(self, name: str) -> bytes | None:
        path = self._root / name
        try:
            return path.read_bytes() if path.stat().st_size <= _LARGEST_SIDE_FILE_BYTES else None
        except OSError:
            return None

    def __del__(self) -> None:
        for descriptor in self._open_files.values():
            os.close(descriptor)


def _data_file(name: str, found: os.stat_result) -> DataFile:
    return DataFile(name, found.st_size, str(found.st_mtime_ns))


def read_at(descriptor: int, start: int, size: int) -> bytes:
    content = os.pread(descriptor, size, start)
    while 0 < len(content) < size:  # a signal, or more than 2 GiB
        more = os.pread(descriptor, size - len(content), start + len(content))
        if not more:
            break
        content += more
    return content


def _archives_in(root: Path) -> list[str]:
    names, folders = list[str](), dict[str, bool]()
    for entry in os.scandir(root):
        if not entry.is_dir():
            names.append(entry.name)
        elif part_named(entry.name) or entry.name == _DATA_FOLDER:
            below = list(os.scandir(entry.path))
            folders[entry.name] = any(inner.is_dir() and not hidden_reason(inner.name) for inner in below)
            names += [f"{entry.name}/{inner.name}" for inner in below if not inner.is_dir()]
        else:
            folders[entry.name] = True
    return choose_archives(names, folders)


def has_archives(path: Path) -> bool:
    """Whether a data folder is an archive, or holds archives instead of class folders."""
    if path.is_dir():
        return bool(_archives_in(path))
    if path.is_file() and path.name.lower().endswith(_COMPRESSED_TAR):
        raise UserError(
            "a compressed tar file cannot be read picture by picture",
            where="data-dir",
            got=str(path),
            hint="unpack the compression once: gunzip, bunzip2, unxz or unzstd",
        )
    return path.is_file() and is_archive(path.name)
