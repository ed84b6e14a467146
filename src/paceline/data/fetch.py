"""Downloads files. A file at its destination is always complete and verified.

A file is downloaded under a lock to a temporary name beside its destination, compared with its digest
and then renamed. A reader never sees a partial file. Of several ranks on a node the first one downloads;
the others wait and then find the file. Used for data sets and for pretrained weights. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paceline.errors import DataError

SOCKET_TIMEOUT_S = 20.0
_BLOCK_BYTES = 1 << 20


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the machine-wide lock that belongs to `path`. Wait while another process holds it.

    The lock file is not removed: after a removal two processes could lock two different files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def fetch_file(url: str, destination: Path, *, checksum: str, algorithm: str, what: str) -> Path:
    """The file at `destination`, downloaded from `url` if it is not there yet.

    `checksum` is the file's hex digest under `algorithm`, or the beginning of it.
    """
    if destination.exists():
        return destination
    try:
        with locked(destination):
            if not destination.exists():
                _download(url, destination, checksum.lower(), algorithm)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"could not download {what}",
            where=url,
            got=_reason(error),
            hint=f"fetch that URL where it can be reached and put the file at\n{destination.absolute()}",
        ) from error
    return destination


def _download(url: str, destination: Path, checksum: str, algorithm: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}.", suffix=".part", dir=destination.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as sink:
            digest = _stream(url, sink, algorithm)
        if not checksum or not digest.startswith(checksum):
            raise ValueError(f"{algorithm} {digest[: max(8, len(checksum))]}, expected {checksum}")
        part.chmod(0o644)  # mkstemp gives 0600, but other users may read a shared data folder
        part.replace(destination)
    finally:
        part.unlink(missing_ok=True)


def _stream(url: str, sink: BinaryIO, algorithm: str) -> str:
    """Copy the body of `url` into `sink` and return its digest. A short body is an error."""
    digest = hashlib.new(algorithm)
    received = 0
    with urllib.request.urlopen(url, timeout=SOCKET_TIMEOUT_S) as response:
        promised = response.headers.get("Content-Length")
        while block := response.read(_BLOCK_BYTES):
            sink.write(block)
            digest.update(block)
            received += len(block)
    if promised is not None and received != int(promised):
        raise ValueError(f"the connection ended after {received} of {promised} bytes")
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()  # it is also the open response
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__
