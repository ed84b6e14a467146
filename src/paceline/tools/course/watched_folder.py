"""Every content that a folder has while code changes it: what a kill or a power failure at each moment would leave.

A profile function looks at the folder before and after every function call, also of built-in functions. So it looks
between any two system calls of the code. Code that calls the system several times inside one built-in function is seen
before and after that function, and with half of the new bytes written.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.tools.course.ranks import describe_position

Content = bytes | str | None  # of a file; the target of a link; a folder has none
Tree = dict[str, Content]  # by path below the folder; a folder comes before its files


@dataclass(frozen=True)
class Moment:
    position: str  # the line of the person's file that was executed
    after_kill: Tree
    after_power_failure: Tree  # of each file only what fsync has written to the disk
    inodes: dict[str, int]  # of the files
    fsynced: frozenset[int]  # inodes for which fsync was called before

    def find_damaged(self) -> set[int]:
        """Inodes of the files of which a power failure would lose a part."""
        return {i for name, i in self.inodes.items() if self.after_kill[name] != self.after_power_failure[name]}


class FolderWatch:
    """The moments of a folder, in order: a new one when a name, a content, or what is on the disk changes."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.moments: list[Moment] = []
        self._folder = folder
        self._path = path  # of the person's file
        self._fsynced: frozenset[int] = frozenset()
        self._on_disk: dict[int, bytes] = {}  # what fsync has written, by inode
        self._before: dict[str, tuple[int, Content]] = {}

    def look(self, frame: FrameType | None) -> None:
        try:
            found = dict(_read(self._folder))
        except FileNotFoundError:  # a thread of the person's code removed a file meanwhile
            return
        if found == self._before and self.moments:
            return
        inodes = {name: inode for name, (inode, content) in found.items() if isinstance(content, bytes)}
        # A file system may use the inode of a deleted file again.
        self._on_disk = {inode: data for inode, data in self._on_disk.items() if inode in inodes.values()}
        self._fsynced &= frozenset(inodes.values())
        old = {inode: content for inode, content in self._before.values() if isinstance(content, bytes)}
        tree = {name: content for name, (_, content) in found.items()}
        for name, inode in inodes.items():
            half = _half_written(old.get(inode, b""), tree[name])
            if half is not None:
                self._add(frame, {**tree, name: half}, inodes)
        self._before = found
        self._add(frame, tree, inodes)

    def sync(self, inodes: list[int]) -> None:
        """fsync was called for these files."""
        self.look(sys._getframe())
        for inode, content in self._before.values():
            if inode in inodes and isinstance(content, bytes):
                self._on_disk[inode] = content
                self._fsynced |= {inode}
        tree = {name: content for name, (_, content) in self._before.items()}
        self._add(sys._getframe(), tree, self.moments[-1].inodes)

    def _add(self, frame: FrameType | None, tree: Tree, inodes: dict[str, int]) -> None:
        on_disk = {name: self._on_disk.get(inode, b"") for name, inode in inodes.items()}
        moment = Moment(describe_position(frame, self._path), tree, {**tree, **on_disk}, inodes, self._fsynced)
        self.moments.append(moment)


@contextmanager
def watch_folder(folder: Path, path: Path) -> Iterator[FolderWatch]:
    """Watch `folder` while the block runs. Load the person's file `path` inside the block: it may import os.fsync."""
    watch = FolderWatch(folder, path)
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync", "sync")}

    def sync_one(fd: Any) -> None:
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        real["fsync"](descriptor)
        watch.sync([os.fstat(descriptor).st_ino])

    def sync_all() -> None:
        watch.look(sys._getframe())
        watch.sync(list(watch.moments[-1].inodes.values()))

    os.fsync, os.fdatasync, os.sync = sync_one, sync_one, sync_all
    watch.look(None)
    sys.setprofile(lambda frame, event, argument: watch.look(frame))
    try:
        yield watch
    finally:
        sys.setprofile(None)
        for name, function in real.items():
            setattr(os, name, function)


def fill_folder(folder: Path, tree: Tree) -> None:
    """Make the folder hold this and nothing else."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir()
        elif isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)


def _read(folder: Path, below: str = "") -> Iterator[tuple[str, tuple[int, Content]]]:
    with os.scandir(folder / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{below}{entry.name}"
        if entry.is_symlink():
            yield name, (entry.inode(), str((folder / name).readlink()))
        elif entry.is_dir():
            yield name, (entry.inode(), None)
            yield from _read(folder, f"{name}/")
        else:
            yield name, (entry.inode(), (folder / name).read_bytes())


def _half_written(before: bytes, after: Content) -> bytes | None:
    """A content between both, if a write leads from one to the other. To truncate a file takes one moment."""
    if not isinstance(after, bytes) or after == before or len(after) < len(before):
        return None
    middle = (len(before) + len(after)) // 2
    return after[:middle] + before[middle:]
