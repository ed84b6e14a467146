"""Run a function on real gloo ranks, each its own process, and return the results.

The launcher of training starts them, from a fork server that has torch loaded: a two-rank test takes a tenth of a
second. A rank that raises, dies or hangs fails the test, with the tracebacks of all ranks.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.launch.rank_processes import RankProcesses
from paceline.runtime.detect import World

multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed", "paceline.training.loop", "paceline.parallel.sharding"]
)
_DEADLINE_S = 100


def make_world(rank: int, world_size: int) -> World:
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launcher="the test",
        host="testhost",
        device="cpu",
        backend="gloo",
        threads=1,
    )


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(world, *arguments)` on every rank; results by rank. It must be importable by name."""
    with tempfile.TemporaryDirectory() as folder, RankProcesses() as ranks:
        store = str(Path(folder) / "store")
        readers = []
        for rank in range(world_size):
            reader, writer = multiprocessing.Pipe(duplex=False)
            ranks.start(rank, _rank_main, rank, world_size, store, writer, function, arguments)
            writer.close()
            readers.append(reader)
        answers = _collect(readers)
        # After one failure the others may wait in a collective for ever.
        ranks.end(grace_s=10 if all(ok for ok, _ in answers.values()) else 0.5)
    missing = [rank for rank in range(world_size) if rank not in answers]
    failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
    if failed or missing:
        tracebacks = "\n".join(f"--- rank {rank}\n{text}" for rank, text in failed.items())
        codes = {rank: ranks.exit_codes()[rank] for rank in missing}
        raise AssertionError(f"ranks failed: {sorted(failed)}, no answer (exit codes): {codes}\n{tracebacks}")
    return [answers[rank][1] for rank in range(world_size)]


def _collect(readers: list[multiprocessing.connection.Connection]) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    waiting = dict(enumerate(readers))
    deadline = time.monotonic() + _DEADLINE_S
    while waiting and time.monotonic() < deadline and all(ok for ok, _ in answers.values()):
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=deadline - time.monotonic())
        for rank in [rank for rank, reader in waiting.items() if reader in ready]:
            try:
                answers[rank] = waiting[rank].recv()
            except EOFError:
                answers[rank] = (False, "the rank exited without an answer")
            del waiting[rank]
    return answers


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    writer: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    dist.barrier()  # a rank that ends at once must not close connections that others are still making
    try:
        writer.send((True, function(make_world(rank, world_size), *arguments)))
    except BaseException:
        writer.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
