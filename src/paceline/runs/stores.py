"""Object stores by their URL, through fsspec: where a run's working copy lies, and the few things we ask of a store.

A run in `s3://bucket/path/run` works in `runs/s3/bucket/path/run` of this machine and is mirrored to its store. The
package that speaks a store's protocol is imported only when such a URL is given.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import UserError
from paceline.runs.folder import RUNS

# A store that takes longer is taken for lost, and asked again later.
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 5, 20
_PAUSES_S = (0.2, 0.8)  # before the second and the third try
_CHUNK_BYTES = 8 * 2**20
_T = TypeVar("_T")
_S3 = ("s3", "s3a")
_CREDENTIALS_HINT = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of this machine"
_CHECKPOINT_URL = re.compile(r"(?P<run>.+)/checkpoints(/(?P<name>step-[0-9]+|latest|best))?/*")
_SHORTEST_PATH = {"memory": 1}  # everywhere else the first part is a bucket, and a run never fills a whole one


def is_url(text: str) -> bool:
    return "://" in text


def local_path(text: str, where: str | None = None) -> Path:
    """A path as it is; for a URL its working copy on this machine."""
    if not is_url(text):
        return Path(text)
    protocol, _, rest = text.partition("://")
    parts = [part for part in rest.split("/") if part]
    if len(parts) < _SHORTEST_PATH.get(protocol, 2) or {".", ".."} & set(parts) or not _is_word(protocol):
        raise UserError("this names no place for a run in a store", where=where, got=text, allowed="s3://BUCKET/RUN")
    return RUNS.joinpath(protocol, *parts)


def split_checkpoint(url: str) -> tuple[str, str]:
    """The URL of a run, and which of its checkpoints is meant: step-*, latest, best, or empty for the newest."""
    found = _CHECKPOINT_URL.fullmatch(url)
    return (found["run"], found["name"] or "") if found else (url.rstrip("/"), "")


@dataclass(frozen=True)
class Stored:
    """A file in a store, as a listing shows it."""

    size_bytes: int
    etag: str  # empty where the store knows none


class StoreTrouble(OSError):
    """The store did not do what it was asked to; later it may. Its text is one line for people."""


class Store:
    """What we ask of a store. Names are relative to the run; every failure is a StoreTrouble."""

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self.on_progress: Callable[[], None] = lambda: None  # called while a large file is on its way
        self.before_change: Callable[[], None] = lambda: None  # raises if this process may not write here any more

    def list(self, below: str = "") -> dict[str, Stored]:
        """Every file below a name, as the store sees it now."""

        def find() -> dict[str, Any]:
            self._filesystem.invalidate_cache()
            try:
                return dict(self._filesystem.find(self._path(below), detail=True))
            except FileNotFoundError as error:
                if error.__cause__ is not None:  # not an empty prefix: the bucket itself is missing
                    raise
                return {}

        return {name.removeprefix(self._root).lstrip("/"): _stored(about) for name, about in _ask(find).items()}

    def look_at(self, name: str) -> Stored | None:
        """None if there is no such file."""

        def look() -> Stored:
            self._filesystem.invalidate_cache()
            return _stored(self._filesystem.info(self._path(name)))

        return _ask_for(look)

    def put(self, source: Path, name: str) -> None:
        from fsspec.callbacks import Callback

        self.before_change()
        ticks = Callback(hooks={"progress": lambda size, value: self.on_progress()})
        _ask(lambda: self._filesystem.put_file(str(source), self._path(name), callback=ticks))

    def get(self, name: str, target: Path) -> None:
        _ask(lambda: self._filesystem.get_file(self._path(name), str(target)))

    def write(self, name: str, content: bytes) -> None:
        self.before_change()
        _ask(lambda: self._filesystem.pipe_file(self._path(name), content))

    def read(self, name: str, at_most_bytes: int = 2**20) -> bytes | None:
        """A small file; None if there is no such file."""
        stored = self.look_at(name)
        if stored is None:
            return None
        if stored.size_bytes > at_most_bytes:
            raise StoreTrouble(f"{name} has {stored.size_bytes:,} bytes, more than such a file may have")
        return _ask_for(lambda: bytes(self._filesystem.cat_file(self._path(name))))

    def sum_up(self, name: str, add: Callable[[bytes, int], int]) -> int:
        """A sum over all bytes of a file, read back from the store."""

        def read() -> int:
            total = 0
            with self._filesystem.open(self._path(name), "rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    total = add(chunk, total)
            return total

        return _ask(read)

    def copy(self, source: str, target: str) -> None:
        self.before_change()
        _ask(lambda: self._filesystem.cp_file(self._path(source), self._path(target)))

    def remove(self, name: str) -> None:
        self.before_change()
        _ask_for(lambda: self._filesystem.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _ask(question: Callable[[], _T]) -> _T:
    """Ask, and ask again if the store stumbles. Stores fail with errors of their own kinds; for us they are one."""
    for pause_s in (*_PAUSES_S, None):
        try:
            return question()
        except Exception as error:
            if pause_s is None or _is_final(error):
                raise StoreTrouble((" ".join(str(error).split()) or type(error).__name__)[:200]) from error
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def _ask_for(question: Callable[[], _T]) -> _T | None:
    """The same for something that may not be there."""
    try:
        return _ask(question)
    except StoreTrouble as trouble:
        if isinstance(trouble.__cause__, FileNotFoundError):
            return None
        raise


def _is_final(error: Exception) -> bool:
    """Whether asking again is of no use."""
    final = FileNotFoundError | NotADirectoryError | PermissionError
    return isinstance(error, final) or "credentials" in type(error).__name__.lower()


def _stored(about: dict[str, Any]) -> Stored:
    return Stored(int(about.get("size") or 0), str(about.get("ETag") or "").strip('"'))


def open_store(url: str, where: str) -> Store:
    """Find who speaks the protocol. Asks the store nothing yet."""
    protocol = url.partition("://")[0]
    try:
        import fsspec
        from fsspec.registry import known_implementations as known
    except ImportError as error:
        raise _missing_package(protocol, "fsspec", where) from error
    if protocol not in fsspec.available_protocols():
        close = difflib.get_close_matches(protocol, known, n=1)
        raise UserError(
            f"there is no store {protocol}://",
            where=where,
            got=url,
            allowed="s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or another protocol of fsspec",
            hint=f"{close[0]}://..." if close else None,
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = str(known.get(protocol, {}).get("class", protocol)).partition(".")[0]
        raise _missing_package(protocol, package, where) from error
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **_options(protocol, fsspec.config.conf))
    except Exception as error:
        raise UserError("this store cannot be opened", where=where, got=f"{url}: {error}") from error
    if protocol in _S3:
        filesystem.retries = 1  # trying again is our business, the same for every store
    return Store(url, filesystem, str(root))


def explain(store: Store, where: str, trouble: StoreTrouble) -> UserError:
    """The first questions to a store: what goes wrong here is, as a rule, a wrong name or missing rights."""
    cause = trouble.__cause__
    got = f"{store.url}: {trouble}"
    is_s3 = store.url.partition("://")[0] in _S3
    if "credentials" in type(cause).__name__.lower():
        hint = _CREDENTIALS_HINT if is_s3 else None
        return UserError("the store wants credentials, and there are none", where=where, got=got, hint=hint)
    if isinstance(cause, PermissionError):
        hint = "does this account have the right to list, read, write and delete there?"
        return UserError("the store refuses access", where=where, got=got, hint=hint)
    if isinstance(cause, NotADirectoryError | FileExistsError):
        hint = "another place, or move that file away"
        return UserError("a part of this path in the store is a file", where=where, got=got, hint=hint)
    if isinstance(cause, FileNotFoundError):
        return UserError("the store has no such bucket", where=where, got=got, hint="make it first, or mend its name")
    hint = "AWS_ENDPOINT_URL names a store other than Amazon's" if is_s3 else None
    return UserError("the store does not answer", where=where, got=got, hint=hint)


def _options(protocol: str, configured: dict[str, Any]) -> dict[str, Any]:
    """Nothing is remembered between two questions, and no question takes for ever."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    if protocol in _S3:
        ours = {
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            "retries": {"max_attempts": 0},
        }
        options["config_kwargs"] = {**ours, **configured.get(protocol, {}).get("config_kwargs", {})}
    return options


def _missing_package(protocol: str, package: str, where: str) -> UserError:
    hint = "pip install 'paceline[s3]'" if protocol in _S3 else f"pip install {package}"
    return UserError(f"{protocol}:// needs the package {package}", where=where, got="not installed", hint=hint)


def _is_word(protocol: str) -> bool:
    return protocol.replace("+", "").replace("-", "").isalnum()
