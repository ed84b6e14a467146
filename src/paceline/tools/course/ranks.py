"""Run a student's functions on real gloo ranks, and report how each rank ends.

A rank returns a value, raises an error, dies, or hangs. A hang is detected without a long timeout: if all ranks wait
and use no processor time, they never continue. Each rank reports the line in which it waits.
"""

from __future__ import annotations

import importlib.util
import linecache
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from paceline.errors import Cause
from paceline.launch.causes import cause_of
from paceline.launch.rank_processes import RankProcesses, start_fork_server
from paceline.runtime.detect import STORE_FD
from paceline.runtime.peers import listen_on_loopback
from paceline.tools.course.verdict import Failed

Probe = Callable[..., Any]  # probe(student's module, rank, world size, *arguments), importable by name

_QUIET_S = 3.0  # a rank that uses almost no processor time for so long is waiting
_QUIET_CPU_S = 0.06
_TICK_S = 0.25
_DEADLINE_S = 60.0  # no exercise needs longer
_AFTER_AN_ERROR_S = 0.5
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # never reached: a hang is detected earlier


@dataclass(frozen=True)
class Ending:
    """How a rank ended: value, error, missing (a name), died, peer-lost; or its state at the end: stuck, endless.

    peer-lost: the rank waited in a collective for a rank that had closed the group. This is a hang that ended early.
    """

    kind: str
    value: Any = None  # of error, peer-lost, stuck or endless: a description


@dataclass(frozen=True)
class _Start:
    path: Path
    rank: int
    world_size: int
    store: str  # a file; "" if the student's code opens the group
    port: int  # for a group that the student's code opens
    probe: Probe
    arguments: tuple[Any, ...]


def warm_up(modules: tuple[str, ...]) -> None:
    """Start the server that forks the ranks. It loads torch and `modules` in parallel with this process."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    # The ranks use CPUs. fully_shard would move a model to a GPU that it sees; gloo cannot gather there.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        start_fork_server(["torch", "torch.distributed", "paceline.tools.course.ranks", *modules])
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def on_ranks(
    path: Path, world_size: int, probe: Probe, *arguments: Any, has_group: bool = True, per_node: int = 0
) -> list[Any]:
    """Run `probe` on every rank and return the values by rank. Any other ending raises Failed."""
    return require_values(try_ranks(path, world_size, probe, *arguments, has_group=has_group, per_node=per_node))


def try_ranks(
    path: Path,
    world_size: int,
    probe: Probe,
    *arguments: Any,
    has_group: bool = True,
    per_node: int = 0,
) -> list[Ending]:
    """Run `probe` on every rank and return how each rank ends. `per_node`: ranks on each simulated node; 0: all."""
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as folder, RankProcesses() as ranks:
        store = str(Path(folder) / "store") if has_group else ""
        listener = None if has_group else listen_on_loopback()
        port = listener.getsockname()[1] if listener is not None else 0
        local_world_size = per_node or world_size
        lines = []
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            start = _Start(path.resolve(), rank, world_size, store, port, probe, arguments)
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % local_world_size),
                "LOCAL_WORLD_SIZE": str(local_world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            own_listener = listener if rank == 0 else None
            # A rank gets the variables of this process, and these. Like its server, it must not see a GPU.
            own = {**variables, "CUDA_VISIBLE_DEVICES": ""}
            ranks.start(rank, _be_a_rank, start, theirs, environment=own, listener=own_listener)
            theirs.close()
            lines.append(ours)
        if listener is not None:
            listener.close()  # rank 0 has its own copy
        try:
            return _follow(lines)
        finally:
            ranks.end()
            for line in lines:
                line.close()


def require_values(endings: list[Ending]) -> list[Any]:
    """The values, or the first bad ending as Failed."""
    for rank, ending in enumerate(endings):
        if ending.kind == "error":
            raise Failed(
                "exception",
                f"rank {rank}: {ending.value}",
                "Python stopped in this line. Which values do the variables have on this rank?",
            )
    missing = [ending.value for ending in endings if ending.kind == "missing"]
    if missing:
        raise Failed(
            "missing-name",
            f"your file has no `{missing[0]}`",
            "The check calls it by this name. `paceline course start ANOTHER` makes a new copy to compare with.",
        )
    for rank, ending in enumerate(endings):
        if ending.kind == "died":
            raise Failed(
                "died",
                f"the process of rank {rank} ended",
                "Your code ends the process (os._exit, a signal), or a collective got tensors of different types or "
                "sizes: then the backend may end the process.",
            )
    if any(ending.kind == "endless" for ending in endings):
        raise Failed(
            "endless",
            describe_endings(endings),
            f"Is there a loop that does not end? An exercise needs about a second; the limit is {_DEADLINE_S:.0f} s.",
        )
    if any(ending.kind in ("stuck", "peer-lost") for ending in endings):
        raise Failed(
            "hang",
            describe_endings(endings),
            "A collective returns only when every rank has called the same one. Look for a rank that skips it "
            "(an `if rank == 0`, a `return` before it, fewer turns of a loop) or calls another one instead.",
        )
    return [ending.value for ending in endings]


def describe_endings(endings: list[Ending]) -> str:
    """Where each rank is, one line per rank."""
    lines = []
    for rank, ending in enumerate(endings):
        if ending.kind == "value":
            lines.append(f"rank {rank} has returned from the function")
        elif ending.kind == "peer-lost":
            lines.append(f"rank {rank} waited in {ending.value.splitlines()[0]}")
        else:
            lines.append(f"rank {rank} {ending.value}")
    return "\n".join(lines)


# --- The watching side ------------------------------------------------------------------------------------------------


def _follow(lines: list[Any]) -> list[Ending]:
    endings: dict[int, Ending] = {}
    quiet: dict[int, str] = {}  # positions of the ranks that wait
    busy: dict[int, str] = {}  # last positions of the others
    deadline = time.monotonic() + _DEADLINE_S
    while len(endings) < len(lines) and time.monotonic() < deadline:
        open_lines = [line for rank, line in enumerate(lines) if rank not in endings]
        for line in multiprocessing.connection.wait(open_lines, timeout=_TICK_S):
            rank = lines.index(line)
            try:
                kind, value = lines[rank].recv()
            except (EOFError, ConnectionResetError):
                kind, value = "died", None
            if kind in ("quiet", "busy"):
                quiet.pop(rank, None)
                (quiet if kind == "quiet" else busy)[rank] = value
                continue
            endings[rank] = Ending(kind, value)
            if kind in ("error", "peer-lost", "missing", "died"):
                # The others may now wait for ever. Wait briefly for their own errors.
                deadline = min(deadline, time.monotonic() + _AFTER_AN_ERROR_S)
        missing = [rank for rank in range(len(lines)) if rank not in endings]
        if missing and all(rank in quiet for rank in missing):
            return [endings.get(rank) or Ending("stuck", quiet[rank]) for rank in range(len(lines))]
    late = {rank: Ending("endless", busy.get(rank, "is still busy")) for rank in range(len(lines))}
    stuck = {rank: Ending("stuck", position) for rank, position in quiet.items()}
    return [{**late, **stuck, **endings}[rank] for rank in range(len(lines))]


# --- The side of a rank -----------------------------------------------------------------------------------------------


def _be_a_rank(start: _Start, line: Any) -> None:
    import torch
    import torch.distributed as dist

    from paceline.runtime.group import stay_on_loopback

    torch.set_num_threads(1)
    stay_on_loopback()
    if STORE_FD in os.environ:
        # torch reuses a store's server of the same process and port. By itself it would listen at every address.
        server = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            start.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=int(os.environ[STORE_FD]),
        )
        assert server.port == start.port
    if start.store:
        store = dist.FileStore(start.store, start.world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=start.rank, world_size=start.world_size, timeout=_COLLECTIVE_TIMEOUT
        )
    lock = threading.Lock()  # two threads use one pipe

    def say(kind: str, value: Any) -> None:
        with lock, suppress(BrokenPipeError):
            line.send((kind, value))

    watcher = threading.Thread(target=_watch, args=(start.path, say), daemon=True)
    watcher.start()
    person = None
    try:
        person = load_person(start.path)
        say("value", start.probe(person, start.rank, start.world_size, *start.arguments))
    except AttributeError as error:
        is_missing = person is not None and error.obj is person
        say("missing" if is_missing else "error", error.name if is_missing else describe_error(error, start.path))
    except BaseException as error:
        kind = "peer-lost" if cause_of(error) is Cause.PEER_LOST else "error"
        say(kind, describe_error(error, start.path))
    sys.stdout.flush()
    # Wait until all ranks have ended: if this process exits, a hang of the others becomes a connection error.
    with suppress(EOFError, ConnectionResetError):
        line.recv()
    os._exit(0)


def load_person(path: Path) -> ModuleType:
    """Load the student's file as a module; the file may have any name."""
    spec = importlib.util.spec_from_file_location("exercise", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["exercise"] = module
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return module


def _watch(path: Path, say: Callable[[str, Any], None]) -> None:
    """Report when this rank starts to wait or continues, and regularly where it is."""
    main = threading.main_thread().ident or 0
    ticks = round(_QUIET_S / _TICK_S)
    used = [time.process_time()]
    turn = still_for = 0
    is_quiet = False
    while True:
        time.sleep(_TICK_S)
        used = [*used[-ticks:], time.process_time()]
        still_for = 0 if _wants_processor() else still_for + 1
        was_quiet, is_quiet = is_quiet, still_for > ticks and used[-1] - used[0] < _QUIET_CPU_S
        turn = (turn + 1) % ticks
        if is_quiet != was_quiet or turn == 0:
            verb = "waits" if is_quiet else "is still busy"
            position = describe_position(sys._current_frames().get(main), path)
            say("quiet" if is_quiet else "busy", f"{verb} {position}")


def _wants_processor() -> bool:
    """Whether another thread of this process runs or waits for a processor. Known only on Linux."""
    own = threading.get_native_id()
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if int(task.name) != own and state in "RD":
                return True
    return False


def describe_position(frame: FrameType | None, path: Path) -> str:
    while frame is not None:
        if Path(frame.f_code.co_filename) == path:
            text = linecache.getline(str(path), frame.f_lineno).strip()
            return f"in line {frame.f_lineno} of your file: {text}"
        frame = frame.f_back
    return "outside your file"


def describe_error(error: BaseException, path: Path) -> str:
    """The innermost line of the student's file, and the error in one line."""
    message = (str(error).strip().splitlines() or [""])[0][:300]
    sentence = f"{type(error).__name__}: {message}" if message else type(error).__name__
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(entry.filename) == path:
            return f"line {entry.lineno}: {entry.line}\n{sentence}"
    return sentence
