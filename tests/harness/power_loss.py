"""Every state in which a crash may leave a recorded folder.

Two kinds of crash, at every point between two operations of a record:

- kill: the process ends. The system survives, so the disk holds everything that was done.
- power loss: what was not fsynced may be missing. The model is the weakest that POSIX allows, weaker than any
  journaling file system: names of a folder are durable only after fsync of that folder, contents of a file only after
  fsync of that file. Of the changes to names that are not durable, any subset may have reached the disk; a rename
  within one folder is atomic. Contents that are not durable may be missing, cut off, torn, or replaced by zeros.
  fsync of a file does not make its name durable, fsync of a folder does not make its own name durable.

If the number of combinations exceeds a limit, each folder and each file goes through all of its states, once while all
others have lost everything and once while they have lost nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.recorded_disk import Content, Entries, Inode, Mark, Record, StoreChange, Sync, Tree, Truncate, Write

MOST_SUBSETS = 32  # of the pending changes of one folder: all subsets of five changes
MOST_COMBINATIONS = 48  # of the states of all folders and files at one point


@dataclass(frozen=True)
class Crash:
    """The remaining files, and what was reported before the crash."""

    kind: str  # kill or power loss
    point: int  # number of completed operations
    after: str  # the last completed operation
    tree: Tree
    store: dict[str, bytes]
    reported: tuple[Mark, ...]

    def __str__(self) -> str:
        return f"{self.kind} at point {self.point}, after: {self.after}"

    def last(self, what: str, default: Any = None) -> Any:
        """The newest value reported under a name."""
        return next((mark.value for mark in reversed(self.reported) if mark.what == what), default)


def kills(record: Record) -> Iterator[Crash]:
    """The folder after every prefix of the record, nothing lost."""
    yield from _distinct(record, lambda prefix: [_everything(record, prefix)], "kill")


def power_losses(record: Record) -> Iterator[Crash]:
    """The folder after every prefix of the record, with every loss that the model allows (within the limits)."""
    yield from _distinct(record, lambda prefix: _losses(record, prefix), "power loss")


def replay(record: Record) -> Tree:
    """The folder after all operations."""
    return _everything(record, len(record.operations))


def make_folder(tree: Tree, target: Path) -> None:
    """A real folder with these contents. Hard links become copies."""
    target.mkdir()
    for name, content in tree.items():  # a folder comes before its contents
        path = f"{target}/{name}"
        if content is None:
            os.mkdir(path)  # noqa: PTH102 - pathlib is slow for thousands of states
        elif isinstance(content, str):
            os.symlink(content, path)  # noqa: PTH211
        else:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, content)
            os.close(descriptor)


def _distinct(record: Record, states: Any, kind: str) -> Iterator[Crash]:
    """The folder and the reports so far, after every prefix. Identical states are tested once."""
    seen = set()
    # Reports at the beginning belong to the time before the record.
    first = next((i for i, operation in enumerate(record.operations) if not isinstance(operation, Mark)), 0)
    for prefix in range(first, len(record.operations) + 1):
        done = record.operations[:prefix]
        reported = tuple(operation for operation in done if isinstance(operation, Mark))
        store = dict(record.store)
        for operation in done:
            if isinstance(operation, StoreChange):
                store.pop(operation.name, None)
                store |= {} if operation.data is None else {operation.name: operation.data}
        after = record.describe(done[-1]) if done else "nothing"
        for tree in states(prefix):
            key = (tuple(tree.items()), tuple(store.items()), len(reported))
            if key not in seen:
                seen.add(key)
                yield Crash(kind, prefix, after, tree, store, reported)


# --- Single folders and files


def _everything(record: Record, prefix: int) -> Tree:
    operations = record.operations[:prefix]
    changes = [operation for operation in operations if isinstance(operation, Entries)]
    contents = {inode: _content(record, inode, operations) for inode in _files(record)}
    return _tree(record, _folders(record, changes), contents)


def _losses(record: Record, prefix: int) -> Iterator[Tree]:
    operations = record.operations[:prefix]
    synced: dict[Inode, int] = {}
    for index, operation in enumerate(operations):
        if isinstance(operation, Sync):
            synced[operation.inode] = index
    durable: list[int] = []
    pending: dict[tuple[Inode, ...], list[int]] = {}
    for index, operation in enumerate(operations):
        if isinstance(operation, Entries):
            folders = tuple(sorted({folder for folder, _, _ in operation.changes}))
            if all(synced.get(folder, -1) > index for folder in folders):
                durable.append(index)
            else:
                pending.setdefault(folders, []).append(index)
    contents = {inode: _contents(record, inode, operations, synced.get(inode, -1)) for inode in _files(record)}
    name_axes = [_subsets(indexes) for indexes in pending.values()]
    uncertain = [inode for inode, possible in contents.items() if len(possible) > 1]
    for choice in _combinations([*name_axes, *(contents[inode] for inode in uncertain)]):
        kept = sorted([*durable, *itertools.chain.from_iterable(choice[: len(name_axes)])])
        chosen = {inode: possible[0] for inode, possible in contents.items()}
        chosen |= dict(zip(uncertain, choice[len(name_axes) :], strict=True))
        changes = [operation for index in kept if isinstance(operation := operations[index], Entries)]
        yield _tree(record, _folders(record, changes), chosen)


def _combinations(axes: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """All combinations; above the limit one axis at a time. An axis starts with all kept and ends with all lost."""
    count = 1
    for axis in axes:
        count *= len(axis)
    if count <= MOST_COMBINATIONS:
        yield from itertools.product(*axes)
        return
    for others in (0, -1):
        for number, axis in enumerate(axes):
            for value in axis:
                yield tuple(value if number == other else axes[other][others] for other in range(len(axes)))


def _subsets(indexes: list[int]) -> list[tuple[int, ...]]:
    """All subsets; above the limit all prefixes, and all with one lost or one kept. All kept first, none last."""
    if 2 ** len(indexes) <= MOST_SUBSETS:
        sizes = range(len(indexes), -1, -1)
        return [subset for size in sizes for subset in itertools.combinations(indexes, size)]
    whole = tuple(indexes)
    some = {whole[:size] for size in range(1, len(whole))} | {(index,) for index in whole}
    some |= {tuple(index for index in whole if index != lost) for lost in whole}
    return [whole, *sorted(some - {whole}), ()]


def _contents(record: Record, inode: Inode, operations: list[Any], synced: int) -> list[bytes]:
    """The possible contents of a file: everything, or the durable part with a changed rest."""
    durable = _content(record, inode, operations[: synced + 1])
    pending = [operation for operation in operations[synced + 1 :] if _is_data_of(operation, inode)]
    if not pending:
        return [durable]
    whole = _content(record, inode, operations)
    partial = [_content(record, inode, operations[: synced + 1] + pending[:size]) for size in range(1, len(pending))]
    written = max((len(durable), *(operation.offset for operation in pending if isinstance(operation, Write))))
    kept = durable if whole.startswith(durable) else b""
    torn = whole[: (len(kept) + len(whole)) // 2]
    zeros = kept + bytes(len(whole) - len(kept))
    tail = whole[: min(written, len(whole))] + bytes(max(0, len(whole) - written))
    return list(dict.fromkeys([whole, *partial, torn, zeros, tail, durable]))


def _is_data_of(operation: Any, inode: Inode) -> bool:
    return isinstance(operation, Write | Truncate) and operation.inode == inode


def _content(record: Record, inode: Inode, operations: list[Any]) -> bytes:
    content = record.files.get(inode, b"")
    for operation in operations:
        if isinstance(operation, Write) and operation.inode == inode:
            content = content.ljust(operation.offset, b"\0")
            content = content[: operation.offset] + operation.data + content[operation.offset + len(operation.data) :]
        elif isinstance(operation, Truncate) and operation.inode == inode:
            content = content[: operation.size].ljust(operation.size, b"\0")
    return content


def _files(record: Record) -> list[Inode]:
    return [inode for inode, kind in record.kinds.items() if kind == "file"]


def _folders(record: Record, changes: list[Entries]) -> dict[Inode, dict[str, Inode]]:
    folders = {inode: dict(entries) for inode, entries in record.folders.items()}
    for operation in changes:
        for folder, name, inode in operation.changes:
            entries = folders.setdefault(folder, {})
            entries.pop(name, None)
            if inode is not None:
                entries[name] = inode
    return folders


def _tree(record: Record, folders: dict[Inode, dict[str, Inode]], contents: dict[Inode, bytes]) -> Tree:
    """All paths that can be reached from the root, sorted by name."""
    tree: dict[str, Content] = {}

    def add(folder: Inode, path: str) -> None:
        for name, inode in sorted(folders.get(folder, {}).items()):
            kind = record.kinds[inode]
            tree[path + name] = None if kind == "folder" else record.links[inode] if kind == "link" else contents[inode]
            if kind == "folder":
                add(inode, f"{path}{name}/")

    add(record.root, "")
    return tree
