"""Object stores by their URL, through fsspec: the path of a run's working copy, and the operations on a store.

A run in `s3://bucket/path/run` works in `runs/s3/bucket/path/run` of this machine and is mirrored to its store. The
package for a protocol is imported only if a URL with this protocol is given.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import UserError
from paceline.runs.folder import MIRROR_NOTE, RUNS, write_json
from paceline.runs.json_files import MIRROR, fit, read_bounded
from paceline.settings.extras import how_to_install
from paceline.settings.small_files import parse_json

# A request that takes longer has failed, and is repeated later.
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 5, 20
_PAUSES_S = (0.2, 0.8)  # before the second and the third try
_CHUNK_BYTES = 8 * 2**20
_T = TypeVar("_T")
_S3 = ("s3", "s3a")
_CREDENTIALS_HINT = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of this machine"
_CHECKPOINT_URL = re.compile(r"(?P<run>.+)/checkpoints(/(?P<name>step-[0-9]+|latest|best))?/*")
_SHORTEST_PATH = {"memory": 1}  # elsewhere the first part is a bucket, and a run needs a path in it
_LARGEST_NOTE_BYTES = 100_000


def is_url(text: str) -> bool:
    return "://" in text


def local_path(text: str, where: str | None = None) -> Path:
    """A path as it is; for a URL its working copy on this machine."""
    if not is_url(text):
        return Path(text)
    protocol, _, rest = text.partition("://")
    parts = [part for part in rest.split("/") if part]
    if len(parts) < _SHORTEST_PATH.get(protocol, 2) or {".", ".."} & set(parts) or not _is_protocol(protocol):
        raise UserError("this URL names no run in a store", where=where, got=text, allowed="s3://BUCKET/RUN")
    return RUNS.joinpath(protocol, *parts)


def split_checkpoint(url: str) -> tuple[str, str]:
    """The URL of a run, and which of its checkpoints is meant: step-*, latest, best, or empty for the newest."""
    found = _CHECKPOINT_URL.fullmatch(url)
    return (found["run"], found["name"] or "") if found else (url.rstrip("/"), "")


@dataclass(frozen=True)
class Stored:
    """A file in a store, as a listing shows it."""

    size_bytes: int
    etag: str  # empty if the store has none
    modified: str = ""  # the time of the last change, if the store has it


class StoreError(OSError):
    """A request to a store has failed; a later one may succeed. The text is one line for people."""


class Store:
    """Operations on a store. Names are relative to the run. Every failure is a StoreError."""

    def __init__(
        self,
        url: str,
        filesystem: Any,
        root: str,
        on_progress: Callable[[], None] = lambda: None,
        before_change: Callable[[Store], None] = lambda store: None,
    ) -> None:
        """`on_progress` is called during the upload of a large file, `before_change` before every change.

        `before_change` raises if this process must not write any more.
        """
        self.url = url
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._on_progress = on_progress
        self._before_change = before_change

    def list(self, below: str = "") -> dict[str, Stored]:
        """All files below a name, without a cache."""

        def find() -> dict[str, Any]:
            self._filesystem.invalidate_cache()
            try:
                return dict(self._filesystem.find(self._path(below), detail=True))
            except FileNotFoundError as error:
                if error.__cause__ is not None:  # not an empty prefix: the bucket itself is missing
                    raise
                return {}

        return {name.removeprefix(self._root).lstrip("/"): _stored(about) for name, about in _request(find).items()}

    def info(self, name: str) -> Stored | None:
        """None if there is no such file."""

        def look() -> Stored:
            self._filesystem.invalidate_cache()
            return _stored(self._filesystem.info(self._path(name)))

        return _request_or_none(look)

    def put(self, source: Path, name: str) -> None:
        from fsspec.callbacks import Callback

        self._before_change(self)
        ticks = Callback(hooks={"progress": lambda size, value: self._on_progress()})
        _request(lambda: self._filesystem.put_file(str(source), self._path(name), callback=ticks))

    def get(self, name: str, target: Path) -> None:
        _request(lambda: self._filesystem.get_file(self._path(name), str(target)))

    def write(self, name: str, content: bytes) -> None:
        self._before_change(self)
        _request(lambda: self._filesystem.pipe_file(self._path(name), content))

    def read(self, name: str, at_most_bytes: int = 2**20) -> bytes | None:
        """A small file; None if there is no such file."""
        stored = self.info(name)
        if stored is None:
            return None
        if stored.size_bytes > at_most_bytes:
            raise StoreError(f"{name} has {stored.size_bytes:,} bytes, more than such a file may have")
        return _request_or_none(lambda: bytes(self._filesystem.cat_file(self._path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Some bytes of a file; fewer at its end."""
        return _request(lambda: bytes(self._filesystem.cat_file(self._path(name), start=start, end=stop)))

    def sum_up(self, name: str, add: Callable[[bytes, int], int]) -> int:
        """A checksum over all bytes of a file, read back from the store."""

        def read() -> int:
            total = 0
            with self._filesystem.open(self._path(name), "rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    total = add(chunk, total)
            return total

        return _request(read)

    def copy(self, source: str, target: str) -> None:
        self._before_change(self)
        _request(lambda: self._filesystem.cp_file(self._path(source), self._path(target)))

    def remove(self, name: str) -> None:
        self._before_change(self)
        _request_or_none(lambda: self._filesystem.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _request(request: Callable[[], _T]) -> _T:
    """Repeat a request that fails. Every store has its own error classes; they become one."""
    for pause_s in (*_PAUSES_S, None):
        try:
            return request()
        except Exception as error:
            if pause_s is None or _is_final(error):
                raise StoreError((" ".join(str(error).split()) or type(error).__name__)[:200]) from error
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def _request_or_none(request: Callable[[], _T]) -> _T | None:
    """The same for a file that may not exist."""
    try:
        return _request(request)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _is_final(error: Exception) -> bool:
    """Whether a repeated request would fail again."""
    final = FileNotFoundError | NotADirectoryError | PermissionError
    return isinstance(error, final) or "credentials" in type(error).__name__.lower()


def _stored(about: dict[str, Any]) -> Stored:
    modified = next((about[name] for name in ("LastModified", "mtime", "updated", "created") if about.get(name)), "")
    return Stored(int(about.get("size") or 0), str(about.get("ETag") or "").strip('"'), str(modified))


def open_store(
    url: str,
    where: str,
    on_progress: Callable[[], None] = lambda: None,
    before_change: Callable[[Store], None] = lambda store: None,
) -> Store:
    """Find the package for the protocol. Sends no request yet. The functions are those of `Store`."""
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
        filesystem.retries = 1  # we retry ourselves, in the same way for every store
    return Store(url, filesystem, str(root), on_progress, before_change)


def explain(store: Store, where: str, error: StoreError) -> UserError:
    """For the first requests to a store. Usual causes are a wrong name or missing rights."""
    cause = error.__cause__
    got = f"{store.url}: {error}"
    is_s3 = store.url.partition("://")[0] in _S3
    if "credentials" in type(cause).__name__.lower():
        hint = _CREDENTIALS_HINT if is_s3 else None
        return UserError("the store requires credentials, and there are none", where=where, got=got, hint=hint)
    if isinstance(cause, PermissionError):
        hint = "does this account have the right to list, read, write and delete there?"
        return UserError("the store refuses access", where=where, got=got, hint=hint)
    if isinstance(cause, NotADirectoryError | FileExistsError):
        hint = "another path, or move that file away"
        return UserError("a part of this path in the store is a file", where=where, got=got, hint=hint)
    if isinstance(cause, FileNotFoundError):
        return UserError(
            "the store has no such bucket", where=where, got=got, hint="create it first, or correct its name"
        )
    hint = "AWS_ENDPOINT_URL names a store other than Amazon's" if is_s3 else None
    return UserError("the store does not answer", where=where, got=got, hint=hint)


def _options(protocol: str, configured: dict[str, Any]) -> dict[str, Any]:
    """No cache between requests, and a limit for the time of each request."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    if protocol in _S3:
        defaults = {
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            "retries": {"max_attempts": 0},
        }
        options["config_kwargs"] = {**defaults, **configured.get(protocol, {}).get("config_kwargs", {})}
    return options


def _missing_package(protocol: str, package: str, where: str) -> UserError:
    hint = how_to_install("s3") if protocol in _S3 else f"pip install {package}"
    return UserError(f"{protocol}:// needs the package {package}", where=where, got="not installed", hint=hint)


def _is_protocol(protocol: str) -> bool:
    return protocol.replace("+", "").replace("-", "").isalnum()


# mirror.json of a run folder: the store that the run is mirrored to, the start that writes there, and its progress.


@dataclass(frozen=True)
class MirrorNote:
    url: str
    token: str = ""  # of the last start from this folder; the start whose token is in the store may write
    keep_last: int = 1
    keep_best: int = 1
    says: str = ""  # for people: up to date, or behind

    def write(self, folder: Path) -> None:
        write_json(folder / MIRROR_NOTE, asdict(self))


def read_own_note(folder: Path) -> MirrorNote | None:
    """The note of a working copy. None for a run without a store, and for any other folder with a note.

    A copy of a working copy would overwrite the store of the original. A folder from elsewhere could name any store
    that this user may write to. So the URL counts only if its working copy is this folder.
    """
    note = read_note(folder)
    try:
        is_own = note is not None and local_path(note.url).resolve() == folder.resolve()
    except (UserError, OSError, ValueError):  # no URL of a run
        return None
    return note if is_own else None


def read_note(folder: Path) -> MirrorNote | None:
    """The content of the file. Only `read_own_note` may be trusted."""
    try:
        return parse_note(read_bounded(folder / MIRROR_NOTE, _LARGEST_NOTE_BYTES))
    except (OSError, ValueError):
        return None


def parse_note(text: bytes | str) -> MirrorNote | None:
    try:
        values = fit(parse_json(text), MIRROR)
    except ValueError:
        return None
    return MirrorNote(**{field.name: values[field.name] for field in fields(MirrorNote) if field.name in values})
