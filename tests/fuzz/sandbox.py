"""Runs many cases in one process with limits: checks the errors, the time and the file access of a reader.

Audit events of the interpreter show which files are opened, changed or executed. A file that a library opens without
Python (safetensors) causes no events. The checks before it do.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

from fuzz.mutations import OUTSIDE, Mutate
from paceline.checkpoints import store as checkpoint_store
from paceline.errors import PacelineError

CPU_LIMIT_S = 5.0  # for one reader and one file; usually milliseconds
WALL_LIMIT_S = 60.0  # a blocked reader uses no CPU; the limit has a margin for a busy machine
MEMORY_LIMIT_BYTES = 1 << 30  # in addition to the memory at the start
LOOPBACK = "a connection to this machine"  # in Format.may_run
TOO_LONG = "it takes too long"
_MOST_FINDINGS = 8  # different ones; fixing these shows more


@dataclass(frozen=True)
class Reader:
    """An action of a user that reads the file. `every`: a slow reader gets one of this number of cases."""

    name: str
    call: Callable[[Path], object]
    every: int = 1
    changes_folder: bool = False


@dataclass(frozen=True)
class Format:
    """One kind of file: how a valid one is made, how it is mutated, and all its readers."""

    name: str
    build: Callable[[Path, Path], None]  # (samples, folder): a folder with a valid file, by the code that writes it
    file: str  # below that folder
    mutate: Mutate
    readers: tuple[Reader, ...]
    prepare: Callable[[Path], None] = lambda folder: None  # after the mutation: for example new checksums
    may_run: tuple[str, ...] = ()  # programs that a reader starts on purpose


@dataclass(frozen=True)
class Finding:
    """A case that violated a rule."""

    format: str
    reader: str
    case: int
    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.format}, case {self.case}, {self.reader}: {self.kind}\n{self.words}"


class _TooLong(BaseException):
    """Raised by the interval timers; no reader may catch it by accident."""


class _Touched(BaseException):
    """A file outside of the case's folder was opened, or something was executed."""


def run_cases(
    form: Format, samples: Path, work: Path, *, seed: int, cases: range, by_all_readers: bool = True
) -> list[Finding]:
    """Mutate and read. Returns the findings. Call it in a separate process, because the limits stay.

    by_all_readers: each case goes to every reader that is due, otherwise to one of them. The second is many
    times faster, so it tries many more mutations in the same time.
    """
    template, folder = work / "template", work / "case"
    template.mkdir(parents=True)
    form.build(samples, template)
    _leave_home(folder)
    (work / OUTSIDE).parent.mkdir()
    (work / OUTSIDE).write_text("secret\n")
    shutil.copytree(template, folder, symlinks=True)
    valid = (template / form.file).read_bytes()
    os.chdir(folder)
    _read_again_at_once()
    _require_valid_is_read(form, folder)
    _renew(template, folder)
    watch = _Watch(folder, form.may_run)
    _limit_memory()
    findings: list[Finding] = []
    for case in cases:
        draw = Random(f"{form.name}:{seed}:{case}")
        content = form.mutate(valid, draw)
        for reader in _choose_readers(form, case, draw, by_all_readers):
            _put(folder, form, content)
            found = _run_case(form, reader, folder, case, watch)
            if found is not None and found.words not in {finding.words for finding in findings}:
                findings.append(found)
                (work / f"{form.name.replace('/', '-')}-{case}.bin").write_bytes(content)
            if reader.changes_folder or found is not None:
                _renew(template, folder)
        if len(findings) >= _MOST_FINDINGS or any(finding.kind == TOO_LONG for finding in findings):
            break
    return findings


def _choose_readers(form: Format, case: int, draw: Random, by_all_readers: bool) -> list[Reader]:
    if by_all_readers:
        return [reader for reader in form.readers if case % reader.every == 0]
    return draw.choices(form.readers, [1 / reader.every for reader in form.readers])


def _leave_home(folder: Path) -> None:
    """Hide settings, caches and programs of the user."""
    for name in [name for name in os.environ if name.startswith(("PACELINE_", "XDG_", "SLURM", "KUBE", "AWS_"))]:
        del os.environ[name]
    os.environ.update(HOME=str(folder), PATH="/nowhere", PACELINE_CACHE=str(folder / "cache"))


def _read_again_at_once() -> None:
    """A damaged checkpoint is read again after a pause. Skip the pause: files do not change here."""
    checkpoint_store.RETRY_PAUSE_S = 0.0


def _renew(template: Path, folder: Path) -> None:
    """A reader may have changed the folder on purpose."""
    os.chdir(folder.parent)
    shutil.rmtree(folder)
    shutil.copytree(template, folder, symlinks=True)
    os.chdir(folder)


def _put(folder: Path, form: Format, content: bytes) -> None:
    (folder / form.file).write_bytes(content)
    form.prepare(folder)


def _require_valid_is_read(form: Format, folder: Path) -> None:
    """If no reader accepted the sample, every mutation would pass. Also runs the late imports of the readers."""
    form.prepare(folder)
    for reader in form.readers:
        with _silence():
            reader.call(folder)


def _run_case(form: Format, reader: Reader, folder: Path, case: int, watch: _Watch) -> Finding | None:
    try:
        with _silence(), _time_limits(), watch.watching():
            reader.call(folder)
    except PacelineError:
        pass
    except _TooLong as error:
        return Finding(form.name, reader.name, case, TOO_LONG, _last_frames(error))
    except _Touched as error:
        return Finding(form.name, reader.name, case, str(error), _last_frames(error))
    except BaseException as error:
        return Finding(form.name, reader.name, case, type(error).__name__, _last_frames(error))
    if watch.violation:  # a reader caught it
        return Finding(form.name, reader.name, case, watch.violation, "")
    return None


def _last_frames(error: BaseException) -> str:
    lines = traceback.format_exception_only(error)[-1:]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "tests/fuzz" not in frame.filename]
    return "".join([f"  {f.filename}:{f.lineno} {f.line}\n" for f in frames[-4:]] + lines)[-2000:]


@contextmanager
def _silence() -> Iterator[None]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _time_limits() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise _TooLong(signal.Signals(number).name)

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# --- File access of a reader ------------------------------------------------------------------------------------------

_EXECUTED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn")
_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "urllib.Request")
_CHANGED = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")
_PARTS_OF_THE_PROGRAM = (
    *(sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[2] / "src")),
    *("/proc", "/sys", "/dev/null", "/dev/urandom", "/usr", "/lib", "/lib64", "/etc/localtime", "/etc/ld.so.cache"),
)


class _Watch:
    """Raises if a reader leaves its folder. An audit hook cannot be removed: one per process."""

    def __init__(self, folder: Path, may_run: tuple[str, ...]) -> None:
        self._folder = os.path.realpath(folder)
        self._may_run = may_run
        self._is_on = False
        self.violation = ""
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.violation, self._is_on = "", True
        try:
            yield
        finally:
            self._is_on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        self._is_on = False  # the code below opens files
        try:
            self.violation = self.violation or self._judge(event, arguments)
        finally:
            self._is_on = True
        if self.violation:
            raise _Touched(self.violation)

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> str:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, mode, flags = arguments
            writes = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR)) or any(letter in (mode or "") for letter in "wax+")
            return "" if self._may_open(path, writes) else f"{'writes' if writes else 'reads'} {os.fsdecode(path)!r}"
        if event in _CHANGED:
            paths = [path for path in arguments[:2] if isinstance(path, str | bytes | os.PathLike)]
            paths = paths[1:] if event == "os.symlink" else paths
            return "" if all(self._may_open(path, True) for path in paths) else f"{event} {paths!r}"
        if event in _EXECUTED:
            program = str(arguments[0])
            return "" if Path(program).name in self._may_run else f"executes {program!r}"
        if event in _NETWORK:
            is_loopback = isinstance(arguments[-1], tuple) and arguments[-1][0] == "127.0.0.1"
            if is_loopback and LOOPBACK in self._may_run:
                return ""
            return f"{event} {arguments[1:]!r}"
        if event == "exec" and isinstance(arguments[0], CodeType):
            file = arguments[0].co_filename
            is_file = Path(file).is_absolute() or Path(file).is_file()  # otherwise text that a library generates
            inside = os.path.realpath(file).startswith(self._folder + os.sep)
            return f"executes {file!r}" if is_file and inside and Path(file).name not in self._may_run else ""
        return ""

    def _may_open(self, path: str | bytes | os.PathLike[Any], writes: bool) -> bool:
        name = os.fsdecode(path)
        if "\0" in name:
            return True  # the kernel refuses it
        real = os.path.realpath(name)
        if real == self._folder or real.startswith(self._folder + os.sep) or real == "/dev/null":
            return True
        return not writes and any(real == part or real.startswith(part + os.sep) for part in _PARTS_OF_THE_PROGRAM)
