"""The process group: opened for the duration of a run, closed when all ranks are done.

Ranks first connect to a store, where each registers (the roll call). They open connections to each other only when all
are registered. Errors can therefore name the missing ranks, or say that something else listens at the address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from paceline.errors import Cause, PacelineError, UserError
from paceline.runtime.detect import RankEnvironment, World, build_world
from paceline.runtime.memory import keep_freed_memory
from paceline.runtime.peers import loopback_interface
from paceline.runtime.pulse import ATTEMPT_DIR, PEERS_FAILED, RunningClock
from paceline.settings.schema import ParallelConfig
from paceline.settings.values import START_TIMEOUT, read_number

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # until the watchdog runs, which has shorter deadlines
_SUSPENDED_TIMEOUT = timedelta(days=365)
_START_TIMEOUT_S = 300.0
_NAME_TIMEOUT_S = 60.0  # a host name that cannot be resolved for this long is wrong
ANSWER_TIMEOUT_S = 8.0
_EXIT_TIMEOUT_S = 60.0
_POLL_S = 0.1


def prepare_rank(config: ParallelConfig, environment: RankEnvironment) -> World:
    """Choose this rank's device, and set its CPU threads and its use of memory."""
    world = build_world(config, environment)
    torch.set_num_threads(world.threads)
    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
    else:
        keep_freed_memory()
    return world


@contextmanager
def process_group(world: World, environment: RankEnvironment, *, needed: bool) -> Iterator[None]:
    """Join the other ranks. A single process makes a group of one only if a strategy needs it."""
    if not needed and world.world_size == 1:
        yield
        return
    device = torch.device(world.device)
    if environment.is_on_one_node:
        stay_on_loopback()
    # nccl for the GPU, and gloo for tensors in CPU memory, for example offloaded shards.
    backend = "cpu:gloo,cuda:nccl" if world.backend == "nccl" else world.backend
    store: Any
    if world.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # in memory: no port is opened for a group of one
    else:
        store = _rendezvous(world, environment)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend != world.backend else None,
    )
    if device.type == "cuda":
        # A step that exchanges gradients is recorded (runtime/recorded.py), which the default stream does not allow.
        torch.cuda.synchronize(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
    yield
    # Only after success: closing waits for all ranks. A rank that failed exits without closing.
    _wait_for_exit(store, world)
    dist.destroy_process_group()


def stay_on_loopback() -> None:
    """For ranks on one machine: by default gloo and NCCL listen at an address that other machines can reach."""
    name = loopback_interface()
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": exactly this interface


def allow_suspension() -> None:
    """Raise torch's timeout: a collective of a suspended job must not time out. The watchdog finds hangs instead."""
    if dist.is_initialized():
        _set_pg_timeout(_SUSPENDED_TIMEOUT)


def _rendezvous(world: World, environment: RankEnvironment) -> Store:
    """The store of this attempt, with every rank present."""
    timeout_s = read_number(START_TIMEOUT, _START_TIMEOUT_S)
    server = connect_store(environment, timeout_s)
    # A prefix per attempt: keys of an earlier attempt in the launcher's store must not be read.
    store = PrefixStore(_prefix(environment.attempt), server)
    _require_all_ranks(store, world, f"{environment.store_host}:{environment.store_port}", timeout_s)
    return store


def connect_store(environment: RankEnvironment, timeout_s: float, name_timeout_s: float = _NAME_TIMEOUT_S) -> TCPStore:
    """The store at MASTER_ADDR and MASTER_PORT. Rank 0 opens it, unless the launcher has; the others wait for it."""
    address = f"{environment.store_host}:{environment.store_port}"
    is_server = environment.rank == 0 and not environment.has_store_server
    if not is_server:
        _wait_for_server(environment, address, timeout_s, name_timeout_s)
    try:
        return _open_store(environment, is_server=is_server)
    except (dist.DistError, TimeoutError) as error:
        what = "it cannot be opened here" if is_server else "what listens there is not rank 0 of this run"
        reason = str(error).splitlines()[0][:200]
        raise PacelineError(
            f"the ranks cannot meet at {address}: {what}",
            got=reason,
            hint="another MASTER_PORT",
            cause=Cause.RENDEZVOUS,
        ) from error


def _open_store(environment: RankEnvironment, *, is_server: bool) -> TCPStore:
    """Open the store in a thread: a foreign server that accepts and sends nothing would block the caller for ever."""
    answers: SimpleQueue[TCPStore | BaseException] = SimpleQueue()
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=ANSWER_TIMEOUT_S)}

    def open_it() -> None:
        try:
            host, port = environment.store_host, environment.store_port
            if is_server:
                listener = _store_listener(environment)
                if listener is not None:
                    options["master_listen_fd"] = listener
            answers.put(TCPStore(host, port, is_master=is_server, **options))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=open_it, name="store", daemon=True).start()
    try:
        answer = answers.get(timeout=1.2 * ANSWER_TIMEOUT_S)
    except Empty:
        raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _store_listener(environment: RankEnvironment) -> int | None:
    """A loopback socket for the store's server. None if the server must listen on all addresses, as torch does."""
    if environment.store_fd is not None:
        return environment.store_fd
    try:
        family, _, _, _, place = socket.getaddrinfo(
            environment.store_host, environment.store_port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror:
        return None
    if not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        return None
    try:
        return socket.create_server(place[:2], family=family, backlog=256).detach()
    except OSError as error:
        raise TimeoutError(str(error)) from error


def _wait_for_server(environment: RankEnvironment, address: str, timeout_s: float, name_timeout_s: float) -> None:
    """Wait until a process listens at the address."""
    clock = RunningClock(2 * ANSWER_TIMEOUT_S)
    where = (environment.store_host, environment.store_port)
    while True:
        try:
            socket.create_connection(where, timeout=ANSWER_TIMEOUT_S).close()
            return
        except OSError as error:
            _refuse_if_peers_failed(error)
            is_name = isinstance(error, socket.gaierror)
            if clock.seconds > (min(timeout_s, name_timeout_s) if is_name else timeout_s):
                what = f"there is no host {where[0]!r}" if is_name else f"there is no answer at {address}"
                raise PacelineError(
                    f"the ranks cannot meet: {what}",
                    got=str(error),
                    hint="MASTER_ADDR and MASTER_PORT must name rank 0's node and a free port there",
                    cause=Cause.RENDEZVOUS,
                ) from error
        time.sleep(_POLL_S)


def _identity(world: World) -> str:
    """The host of a rank and, if it has one, its GPU."""
    if world.device.startswith("cuda"):
        return f"{world.host}, GPU {torch.cuda.get_device_properties(world.device).uuid}"
    return world.host


def require_own_gpus(places: list[str]) -> None:
    """Refuse two ranks on one GPU. They would fail later with an unclear error."""
    for place in places:
        ranks = [rank for rank, other in enumerate(places) if other == place]
        if len(ranks) > 1:
            raise UserError(
                f"{len(ranks)} ranks were given the same GPU",
                where=place,
                got="rank " + ", ".join(map(str, ranks)),
                hint="srun --gpus-per-node=N with N ranks on a node, or --gpus-per-task=1 with --gpu-bind=single:1",
            )


def _refuse_if_peers_failed(error: Exception) -> None:
    """Stop waiting if ranks of another node have failed. The supervisor then creates the file PEERS_FAILED."""
    folder = os.environ.get(ATTEMPT_DIR)
    if folder is not None and (Path(folder) / PEERS_FAILED).exists():
        raise PacelineError("another rank exited before all had arrived", cause=Cause.PEER_LOST) from error


def _prefix(attempt: int) -> str:
    return f"paceline/attempt-{attempt}"


def _require_all_ranks(store: Store, world: World, address: str, timeout_s: float) -> None:
    names = [f"here/{rank}" for rank in range(world.world_size)]
    store.set(names[world.rank], _identity(world))
    clock = RunningClock(2 * ANSWER_TIMEOUT_S)
    while True:
        try:
            store.wait(names, timedelta(seconds=1))
            require_own_gpus([store.get(name).decode() for name in names] if world.backend == "nccl" else [])
            return
        except dist.DistError as error:
            _refuse_if_peers_failed(error)
            if isinstance(error, dist.DistNetworkError):
                raise PacelineError("rank 0 exited before all had arrived", cause=Cause.PEER_LOST) from error
            if clock.seconds < timeout_s:
                continue
            missing = [rank for rank, name in enumerate(names) if not store.check([name])]
            raise PacelineError(
                f"{len(missing)} of {world.world_size} ranks did not arrive within {timeout_s:.0f} s",
                where=address,
                got="missing: rank " + ", ".join(map(str, missing)),
                hint="look at the logs of those ranks' nodes, and check that they can reach that address",
                cause=Cause.RENDEZVOUS,
            ) from error


def _wait_for_exit(store: Store, world: World) -> None:
    """Wait until no rank uses the connections. Rank 0 leaves last, because it may hold the store."""
    if world.world_size == 1:
        return
    names = [f"done/{rank}" for rank in range(world.world_size)]
    with suppress(dist.DistError):  # a rank that dies after its work is done does not matter
        store.set(names[world.rank], "")
        store.wait(names, timedelta(seconds=_EXIT_TIMEOUT_S))
        store.set(f"left/{world.rank}", "")
        if world.is_primary:
            store.wait([f"left/{rank}" for rank in range(world.world_size)], timedelta(seconds=_EXIT_TIMEOUT_S))
