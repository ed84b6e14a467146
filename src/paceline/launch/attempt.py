"""One attempt: torch's elastic agent starts the ranks of this node and our watch looks after them.

Each attempt has an agent and a rendezvous of its own and the agent itself never restarts anything, so nothing
of a broken attempt reaches the next one. Ranks are forked from a server that has torch and this package
loaded already, which makes a new attempt a matter of tenths of a second.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.watch import RankSight, Watch
from paceline.runs.process_handle import ProcessHandle, identity_of_this_process
from paceline.world.detect import ATTEMPT, OWN_LAUNCHER, Nodes
from paceline.world.pulse import ATTEMPT_DIR
from paceline.world.signals import SUPERVISOR_PID

RankMain = Callable[[list[str], dict[str, str]], None]  # arguments, additions to the environment
_JOIN_TIMEOUT_S = 300
_PRELOADED = ["paceline.launch.server", "paceline.training.worker"]


@dataclass(frozen=True)
class Attempt:
    """What to start."""

    number: int
    processes: int
    rank_main: RankMain  # importable by name: the server that forks the ranks looks it up
    arguments: list[str]
    stacks_of: Callable[[int], Path]  # where a rank's stacks go
    nodes: Nodes
    environment: dict[str, str] = field(default_factory=dict)  # for its ranks


@dataclass(frozen=True)
class AttemptEnd:
    """How it went on this node."""

    ranks: dict[int, RankSight]
    exit_codes: dict[int, int | None]  # negative: the signal that ended the rank
    hung: list[int]

    @property
    def is_finished(self) -> bool:
        return bool(self.exit_codes) and all(code == 0 for code in self.exit_codes.values())


class Attempts:
    """Runs attempts, one at a time. Signals go to the ranks of the one under way."""

    def __init__(self, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read by libraries while they are loaded
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a closed socket is told in our own words
        self._watch: Watch | None = None
        self._is_asked_to_stop = False
        _start_fork_server()

    def stop_ranks(self, number: int) -> None:
        """Send a signal that asks for the end, now or as soon as there are ranks. There will be no new ones."""
        self._is_asked_to_stop = True
        if self._watch is not None:
            self._watch.stop_all(number)

    def run(self, attempt: Attempt) -> AttemptEnd:
        attempt_dir = Path(tempfile.mkdtemp(prefix="paceline-attempt-"))
        surroundings = {
            OWN_LAUNCHER: "paceline",
            SUPERVISOR_PID: identity_of_this_process(),
            ATTEMPT_DIR: str(attempt_dir),
            ATTEMPT: str(attempt.number),
            **attempt.environment,
        }
        agent, rendezvous = _build_agent(attempt, surroundings)

        def read_pids() -> dict[int, int]:
            workers = agent.get_worker_group().workers
            return {worker.global_rank: worker.id for worker in workers if worker.id}

        self._watch = watch = Watch(attempt_dir, attempt.stacks_of, read_pids)
        watch.start()
        try:
            if not self._is_asked_to_stop:  # while torch was loaded, say
                agent.run()
        except _rendezvous_errors() as error:
            raise PacelineError(
                f"the agents of {attempt.nodes.count} nodes did not meet",
                where=f"{attempt.nodes.host}:{attempt.nodes.port + attempt.number}",
                got=f"{type(error).__name__}: {error}",
                hint="is there an agent on every node, and do all of them reach that address?",
            ) from error
        finally:
            watch.stop()
            self._watch = None
            if attempt.nodes.count > 1 and any(sight.is_lost for sight in watch.ranks.values()):
                _tell_other_nodes(agent, attempt.number)
            rendezvous.shutdown()
            shutil.rmtree(attempt_dir, ignore_errors=True)
        return AttemptEnd(watch.ranks, _exit_codes(agent, watch), watch.hung)


def _start_fork_server() -> None:
    """In the background: it loads torch while this process does.

    Ctrl-C reaches every process of a terminal, but is this one's business: whom it starts inherits a deaf ear.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # by itself it would be started in there, and end the holding back
    with interrupts_held_back():
        forkserver.ensure_running()


def end_fork_server() -> None:
    """At once, with every rank it has forked: also those being born, which are in nobody's list yet."""
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if server is None:
        return
    with suppress(ProcessLookupError, ChildProcessError):
        handle = ProcessHandle(server)
        handle.send(signal.SIGSTOP)
        os.waitpid(server, os.WUNTRACED)  # now it stands still, and forks no more while its children are counted
        for child in _children_of(server):
            with suppress(ProcessLookupError):
                ProcessHandle(child, parent=server).send(signal.SIGKILL)
        handle.send(signal.SIGKILL)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # no /proc here: those in the list are ended all the same
        return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C comes a moment later, at the end of this block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def load_agent() -> None:
    """Takes a second, and must not be broken off in the middle."""
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401


def _build_agent(attempt: Attempt, surroundings: dict[str, str]) -> tuple[Any, Any]:
    # Imported here: the verbs that start nothing should not wait for torch.
    import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what they would say, we say in our own words
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # the supervisor has handlers of its own
    nodes = attempt.nodes
    # Several nodes need a port they all know; a new one for each attempt, since the last may not be free yet.
    port = nodes.port + attempt.number if nodes.port else 0
    # Alone, a node need not know its own name, which may not even resolve.
    own_address = "localhost" if nodes.count == 1 else None
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{nodes.host}:{port}",
        run_id=f"{nodes.run_id}-{attempt.number}",
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        is_host=nodes.own == 0,
        local_addr=own_address,
        join_timeout=_JOIN_TIMEOUT_S,
    )
    rendezvous = rendezvous_registry.get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="paceline",
        local_world_size=attempt.processes,
        entrypoint=attempt.rank_main,
        args=(attempt.arguments, surroundings),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.05,
        local_addr=own_address,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="forkserver"), rendezvous


def _rendezvous_errors() -> tuple[type[Exception], ...]:
    from torch.distributed.elastic.rendezvous import RendezvousError

    return (RendezvousError,)


def _tell_other_nodes(agent: Any, number: int) -> None:
    """Ranks elsewhere may be waiting for ours at the roll call: they need not."""
    from paceline.world.group import announce_failure

    group = agent.get_worker_group()
    with suppress(RuntimeError, OSError):  # torch's DistError is one of the first
        announce_failure(group.master_addr, group.master_port, number)


def _exit_codes(agent: Any, watch: Watch) -> dict[int, int | None]:
    """The agent tells the first failed rank's only; its process handles know them all."""
    handles = getattr(getattr(agent, "_pcontext", None), "_pc", None)
    codes: dict[int, int | None] = dict.fromkeys(watch.ranks)
    for worker, process in zip(agent.get_worker_group().workers, getattr(handles, "processes", ()), strict=False):
        codes[worker.global_rank] = process.exitcode
    return codes
