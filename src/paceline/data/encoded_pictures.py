"""The interface of encoded pictures (JPEG, PNG, ...): their bytes by number. Imports no torch.

A source is a folder, a table of paths, an archive or a packed set. It sorts its pictures like a folder: by class, then
by name. Every source of the same pictures then gives the same samples in the same order, and so the same weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

FILES = "files"  # the kind of contents that `digest_of_files` makes


class EncodedPictures(Protocol):
    """Encoded pictures by number. Several threads call it at the same time."""

    kind: str  # of `contents`: only contents of one kind are compared
    if_slow: str  # what a user can do if reading is slow; empty if nothing

    def __len__(self) -> int: ...

    def names(self) -> Iterable[bytes]:
        """One per picture: its path in a folder of the same pictures, relative to the root. They identify samples."""
        ...

    def where(self, index: int) -> str:
        """The file of a picture and, in an archive, its name there: for messages."""
        ...

    def read(self, index: int) -> bytes | memoryview:
        """The bytes of a picture. DataError if they cannot be read."""
        ...

    def contents(self) -> str:
        """A digest for the fingerprint of a run's data. It reads no picture."""
        ...


def digest_of_files(files: Iterable[tuple[bytes, int]]) -> str:
    """The contents of pictures with these names and sizes in bytes. Equal for a folder and an archive of it."""
    digest = hashlib.blake2b(digest_size=8)
    for name, size_bytes in files:
        digest.update(name + b"\0%d\n" % size_bytes)
    return digest.hexdigest()
