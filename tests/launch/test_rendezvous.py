"""The rendezvous of the supervisors of several nodes: two `paceline train` on this machine, one per node."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import environment, paceline
from harness.runs import read_results
from harness.short_run import FLAGS
from harness.sockets import port_for_a_gang
from paceline.launch.attempt import Assignment, Rendezvous, StoppedWaiting
from paceline.launch.gang_messages import Hello, encode
from paceline.runtime import peers
from paceline.runtime.detect import Nodes, agent_variables
from paceline.runtime.peers import PROOF_TIMEOUT_S, connect
from paceline.runtime.secret import RUN_SECRET, NotProved, create_secret

TRAIN = [*FLAGS[:2], "--num-samples=740", "--global-batch-size=64", "--epochs=1", "--processes=1", "--output-dir=run"]


@contextmanager
def started_node(own: int, port: int, folder: Path, secret: str) -> Iterator[subprocess.Popen[str]]:
    variables = agent_variables(Nodes(2, own, "127.0.0.1", port))
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", *TRAIN],
        cwd=folder,
        env=environment(**variables, **{RUN_SECRET: secret}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as node:
        try:
            yield node
        finally:
            node.kill()


def test_two_nodes_train_while_other_peers_connect(tmp_path: Path) -> None:
    """SECURITY.md: connections without the secret are closed and logged, and do not disturb the run."""
    port, secret = port_for_a_gang(), create_secret()
    with ExitStack() as stack:
        first = stack.enter_context(started_node(0, port, tmp_path, secret))
        connect_without_secret(port + 1, stack)
        second = stack.enter_context(started_node(1, port, tmp_path, secret))
        said = [node.communicate(timeout=120) for node in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert read_results(tmp_path / "run")["steps"] == 10
    assert said[0][1].count("dropped what 127.0.0.1 sent") >= 2
    written = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert secret not in written + str(said)


def connect_without_secret(port: int, stack: ExitStack) -> None:
    """A node without the secret, one that sends the messages of a node in plain text, and silent connections."""
    while True:
        try:
            connect("127.0.0.1", port, create_secret().encode(), "rendezvous paceline attempt 1")
        except ConnectionRefusedError:
            continue  # node 0 does not listen yet
        except NotProved:
            break
    for _ in range(3):
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    plain = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    plain.sendall(json.dumps(encode(Hello(1, "a", "a", 1, 7))).encode() + b"\n")
    with suppress(ConnectionResetError):
        assert plain.recv(1) == b""


def test_several_nodes_without_a_secret_are_refused(tmp_path: Path) -> None:
    """A run on several nodes without a secret ends at once, and the screen says what to do."""
    variables = agent_variables(Nodes(2, 0, "127.0.0.1", port_for_a_gang()))
    bench = ["bench", "--what=collectives", "--processes=1"]
    for command, value in ((TRAIN, ""), (TRAIN, "short"), (bench, "")):
        answer = paceline(*command, cwd=tmp_path, env={**variables, **({RUN_SECRET: value} if value else {})})
        assert answer.code == 2, answer
        assert RUN_SECRET in answer.err
        assert not (tmp_path / "run").exists()


def rendezvous(
    own: int, port: int, secret: bytes, count: int = 3, stopped: threading.Event | None = None
) -> Rendezvous:
    is_stopped = (stopped or threading.Event()).is_set
    return Rendezvous(Nodes(count, own, "127.0.0.1", port), 1, own + 1, secret, is_stopped, on_failure=lambda: None)


def port_of(part: Assignment) -> int:
    """The port of the store's listener, which is closed."""
    assert part.listener is not None
    with part.listener:
        port: int = part.listener.getsockname()[1]
        return port


def test_ranks_follow_the_number_of_the_node(tmp_path: Path) -> None:
    """Node 0 has rank 0, and each node has the number of ranks that it announced."""
    port, secret = port_for_a_gang(), create_secret().encode()
    nodes = [rendezvous(own, port, secret) for own in range(3)]
    parts = joined(nodes)
    for node in nodes:
        node.close()
    assert {own: (part.first_rank, part.world_size) for own, part in parts.items()} == {0: (0, 6), 1: (1, 6), 2: (3, 6)}
    assert {part.store_port for part in parts.values()} == {port_of(parts[0])}


def joined(nodes: list[Rendezvous]) -> dict[int, Assignment]:
    parts: dict[int, Assignment] = {}
    threads = [
        threading.Thread(target=lambda node=node: parts.update({node.nodes.own: node.join()}), daemon=True)
        for node in reversed(nodes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return parts


@pytest.mark.parametrize("failed", [0, 2])
@pytest.mark.parametrize("how", ["ranks", "supervisor"])
def test_a_failed_node_is_reported_to_all_others(failed: int, how: str) -> None:
    """The others do not wait for its ranks. If the supervisor itself ends, its connection closes."""
    port, secret = port_for_a_gang(), create_secret().encode()
    reported = [threading.Event() for _ in range(3)]
    nodes = [replace(rendezvous(own, port, secret), on_failure=reported[own].set) for own in range(3)]
    parts = joined(nodes)
    if how == "ranks":
        nodes[failed].announce_failure()
    else:
        nodes[failed].close()
    others = {0, 1, 2} - {failed}
    assert all(reported[own].wait(10) for own in others)
    assert how == "supervisor" or not reported[failed].is_set()
    for node in nodes:
        node.close()
    assert port_of(parts[0]) == parts[1].store_port


@pytest.mark.parametrize(
    "change",
    [{"node": 0}, {"node": 3}, {"node": "1"}, {"processes": None}, {"cores": 0}, {"host": 3}, {"extra": 1}],
)
def test_a_malformed_hello_is_closed(change: dict[str, object]) -> None:
    """Even from a peer that knows the secret. The real node joins afterwards."""
    port, secret = port_for_a_gang(), create_secret().encode()
    leader, follower = (rendezvous(own, port, secret, count=2) for own in range(2))
    parts: list[Assignment] = []
    thread = threading.Thread(target=lambda: parts.append(leader.join()), daemon=True)
    thread.start()
    while True:
        try:
            peer = connect("127.0.0.1", port + 1, secret, "rendezvous paceline attempt 1")
            break
        except ConnectionRefusedError:
            continue
    peer.send({**encode(Hello(1, "a", "a", 1, 7)), **change})
    assert peer.receive() is None  # closed
    assert follower.join().first_rank == 1
    thread.join(PROOF_TIMEOUT_S)
    assert [(part.first_rank, part.world_size) for part in parts] == [(0, 3)]
    assert port_of(parts[0]) == parts[0].store_port
    peer.close()
    for node in (leader, follower):
        node.close()


def test_silent_connections_do_not_block_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of silent connections do not block a real node, even without a timeout."""
    monkeypatch.setattr(peers, "PROOF_TIMEOUT_S", 600.0)
    port, secret = port_for_a_gang(), create_secret().encode()
    all_nodes = [rendezvous(own, port, secret, count=2) for own in range(2)]
    parts: dict[int, Assignment] = {}
    threads = [
        threading.Thread(target=lambda own=own: parts.update({own: all_nodes[own].join()}), daemon=True)
        for own in range(2)
    ]
    threads[0].start()
    with ExitStack() as stack:
        silent = 0
        while silent < 200:
            try:
                stack.enter_context(socket.create_connection(("127.0.0.1", port + 1)))
                silent += 1
            except ConnectionRefusedError:
                continue
        threads[1].start()
        for thread in threads:
            thread.join(30)
    assert sorted(parts) == [0, 1]
    assert port_of(parts[0]) == parts[1].store_port
    for node in all_nodes:
        node.close()


def test_a_stop_request_ends_the_wait() -> None:
    """A node with a stop request does not wait for the others."""
    stopped = threading.Event()
    stopped.set()
    port = port_for_a_gang()
    for own in range(2):
        with pytest.raises(StoppedWaiting):
            rendezvous(own, port, create_secret().encode(), stopped=stopped).join()
