"""Check that all nodes share a folder: one node writes a file with a random name, the others look for it.

Nodes without shared storage may each have a local folder with the same name. Training there would lose checkpoints.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.errors import Cause, UserError
from paceline.runs.drafts import draft_of

NODE_LOCAL = "PACELINE_NODE_LOCAL_FOLDER"  # set if an uploader copies checkpoints to every node, as under Metaflow
VISIBLE_WITHIN_S = 5.0  # how long a network file system may take to show a new file
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_MOST_NODES_NAMED = 8
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_token(folder: Path) -> str:
    """The name of a new file in this folder; empty if the disk is full. Raises OSError.

    The name is random, so no node has a cached lookup for it.
    """
    # Use a draft name: if this process is killed, the next owner of the run folder removes the file.
    name = draft_of(folder / "shared-folder").name
    try:
        with (folder / name).open("x") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remove_token(folder, name)
        if error.errno in _NO_ROOM:
            return ""
        raise
    return name


def remove_token(folder: Path, name: str) -> None:
    with suppress(OSError):
        if name:
            (folder / name).unlink(missing_ok=True)


def find_token(folder: Path, name: str, visible_within_s: float = VISIBLE_WITHIN_S) -> str:
    """Empty if this node sees the file; otherwise the reason. Waits, because network file systems show files late."""
    deadline_s, pause_s = time.monotonic() + visible_within_s, _FIRST_PAUSE_S
    while True:
        try:
            if (folder / name).read_text(encoding="utf-8") == name:
                return ""
            trouble = "the file exists but is empty"
        except OSError as error:
            trouble = _describe(folder, error)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return trouble
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _describe(folder: Path, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return error.strerror or str(error)
    return "another folder of this name" if folder.is_dir() else "no such folder"


def not_shared(troubles: Mapping[str, Mapping[str, str]], writer: str) -> UserError:
    """`troubles`: the problem by node and folder. `writer`: the node that wrote the file."""
    nodes = list(troubles)
    named = ", ".join(nodes[:_MOST_NODES_NAMED]) + (", ..." if len(nodes) > _MOST_NODES_NAMED else "")
    folders = list(dict.fromkeys(folder for found in troubles.values() for folder in found))
    seen = [f"{node}: {trouble}" for node, found in troubles.items() for trouble in dict.fromkeys(found.values())]
    verb = "does" if len(nodes) == 1 else "do"
    return UserError(
        f"node {named} {verb} not see the folder of node {writer}",
        where="\n".join(folders),
        got="\n".join(seen[:_MOST_NODES_NAMED]),
        allowed="one folder that all nodes of the run share",
        hint=shared_hint(folders),
        cause=Cause.NOT_SHARED,
    )


def shared_hint(folders: Sequence[str]) -> str:
    return (
        "--output-dir PATH on storage that every node mounts (NFS, Lustre, a shared volume);\n"
        f"df {folders[0] if folders else 'PATH'} on each node shows where the folder is"
    )
