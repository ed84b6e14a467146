"""Nodes before torch connects them: connections, versions, clocks, MTUs, a shared folder. Imports no torch.

A rank listens on a port that the system chooses, as gloo and NCCL do. A client asks several times for the server's
clock, and sends a message as large as gradients, which the server counts. This finds networks that lose only large
packets.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import statistics
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.runs.shared_token import find_token, remove_token, shared_hint, write_token
from paceline.tools.doctor.findings import DoctorFinding, failed, passed, warned

# --- Connections ------------------------------------------------------------------------------------------------------


_TIMEOUT_S = 4.0
_QUESTIONS = 5
_LARGE_BYTES = 512 * 1024
_REQUEST = struct.Struct("!I")  # bytes that follow
_ANSWER = struct.Struct("!dI")  # the host's clock, bytes that arrived
_MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Probe:
    """The result of one rank's connection to another."""

    error: str = ""
    clock_ahead_s: float = 0.0  # the server's clock minus ours
    round_trip_s: float = 0.0
    is_large_lost: bool = False  # small messages arrive, large ones do not

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _ClockServer(socketserver.BaseRequestHandler):
    clock: Callable[[], float]

    def handle(self) -> None:
        self.request.settimeout(_TIMEOUT_S)
        try:
            while True:
                size = _REQUEST.unpack(_receive(self.request, _REQUEST.size))[0]
                arrived = len(_receive(self.request, size))
                self.request.sendall(_ANSWER.pack(self.clock(), arrived))
        except OSError:  # the client has disconnected, or sent nothing
            return


class Listener:
    """Answers connections while the `with` block runs."""

    def __init__(self, clock: Callable[[], float], host: str = "") -> None:
        door = type("Door", (_ClockServer,), {"clock": staticmethod(clock)})
        self._server = socketserver.ThreadingTCPServer((host, 0), door)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Listener:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="door", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def probe_all(places: Sequence[tuple[str, int]], clock: Callable[[], float]) -> list[Probe]:
    """Connect to all in parallel: hosts that drop packets cost one timeout in total."""
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        return list(pool.map(lambda place: probe(place, clock), places))


def probe(place: tuple[str, int], clock: Callable[[], float] = time.time) -> Probe:
    try:
        with socket.create_connection(place, timeout=_TIMEOUT_S) as peer:
            questions = [_ask(peer, 0, clock) for _ in range(_QUESTIONS)]
            try:
                _ask(peer, _LARGE_BYTES, clock)
            except OSError as error:
                return Probe(f"small messages arrive, large ones do not ({error})", is_large_lost=True)
    except OSError as error:
        return Probe(error.strerror or str(error) or type(error).__name__)
    return min(questions, key=lambda answer: answer.round_trip_s)


def _ask(peer: socket.socket, size: int, clock: Callable[[], float]) -> Probe:
    asked_at, started = clock(), time.perf_counter()
    peer.sendall(_REQUEST.pack(size) + bytes(size))
    theirs, arrived = _ANSWER.unpack(_receive(peer, _ANSWER.size))
    round_trip = time.perf_counter() - started
    if arrived != size:
        raise OSError(f"{arrived} of {size} bytes arrived")
    return Probe(clock_ahead_s=theirs - (asked_at + round_trip / 2), round_trip_s=round_trip)


def _receive(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(size - len(data), 1 << 16))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return bytes(data)


# --- Checks -----------------------------------------------------------------------------------------------------------


Identity = dict[str, Any]  # of a rank: rank, host, versions, mtu
_CLOCK_WARN_S, _CLOCK_FAIL_S = 1.0, 30.0
_MANY = 4  # ranks listed by name before the rest is counted


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 1 on n2, rank 3 on n4`."""
    listed = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:_MANY])
    return listed + (f" and {len(ranks) - _MANY} more" if len(ranks) > _MANY else "")


def blame(ranks: Sequence[int], hosts: Sequence[str]) -> list[str]:
    return sorted({hosts[rank] for rank in ranks})


def check_versions(everyone: Sequence[Identity]) -> DoctorFinding:
    hosts = [identity["host"] for identity in everyone]
    for what in everyone[0]["versions"]:
        values = [str(identity["versions"].get(what)) for identity in everyone]
        usual, _ = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            text = f"{what} {values[odd[0]]} at {name_ranks(odd, hosts)}, {usual} at the others"
            remedy = "use the same environment on every node: on a shared disk, in a container image, or reinstalled"
            return failed("versions", text, remedy, nodes=blame(odd, hosts))
    first = everyone[0]["versions"]
    return passed("versions", f"equal on {_ranks(len(everyone))}: torch {first['torch']}, paceline {first['paceline']}")


def check_mtu(everyone: Sequence[Identity]) -> DoctorFinding:
    """Compares the MTU of each node's main interface."""
    by_host = {identity["host"]: identity["mtu"] for identity in everyone if identity["mtu"]}
    if len(set(by_host.values())) > 1:
        usual, _ = Counter(by_host.values()).most_common(1)[0]
        odd = [host for host, mtu in by_host.items() if mtu != usual]
        what = f"{', '.join(f'{host} has {by_host[host]}' for host in odd[:_MANY])}, the others have {usual}"
        remedy = f"ip link set <interface> mtu {min(by_host.values())} on all, or the larger one on all and the switch"
        return warned("mtu", what, remedy, nodes=odd)
    nodes = len({identity["host"] for identity in everyone})
    common = next(iter(by_host.values()), "unknown")
    return passed("mtu", f"{common} on {nodes} node{'s' if nodes > 1 else ''}")


def check_shared(folder: str, writer: str, troubles: Sequence[str], hosts: Sequence[str]) -> DoctorFinding:
    """`troubles`: for each rank why it cannot see the writer's file; empty if it sees the file."""
    odd = [rank for rank, trouble in enumerate(troubles) if trouble]
    if not odd:
        return passed("shared folder", f"{folder}: {_ranks(len(hosts))} read what {writer} wrote there")
    nodes = blame(odd, hosts)
    what = f"{folder}: {', '.join(nodes[:_MANY])} cannot read what {writer} wrote there ({troubles[odd[0]]})"
    return failed("shared folder", what, shared_hint([folder]), nodes=nodes)


def check_reach(probes: Sequence[Sequence[Probe]], hosts: Sequence[str]) -> DoctorFinding:
    """`probes[a][b]`: rank a's connection to rank b."""
    shut = [(a, b) for a, row in enumerate(probes) for b, probe in enumerate(row) if probe.error]
    ranks = len(hosts)
    if not shut:
        longest = max(probe.round_trip_s for row in probes for probe in row)
        return passed("reach", f"all {_ranks(ranks)} reach each other, in {1000 * longest:.1f} ms at most")
    first = shut[0]
    suspects = fewest_to_leave_out(shut)
    what = f"{len(shut)} of {ranks * (ranks - 1)} connections fail: {name_ranks([first[0]], hosts)} does not reach "
    what += f"{name_ranks([first[1]], hosts)} ({probes[first[0]][first[1]].error})"
    remedy = "if there is a firewall between the nodes, open all TCP ports among them (iptables -L, security groups); "
    remedy += "if the address is of the wrong network, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    if probes[first[0]][first[1]].is_large_lost:
        remedy = (
            "the MTU is too large for the network: test with ping -M do -s 1472; reduce it with ip link set ... mtu"
        )
    return failed("reach", what, remedy, nodes=blame(suspects, hosts), shut=[list(pair) for pair in shut[:100]])


def fewest_to_leave_out(shut: Sequence[tuple[int, int]]) -> list[int]:
    """Ranks to leave out so that all connections work. Greedy: the rank with most failures next, of equals the last."""
    left, out = list(shut), []
    while left:
        counts = Counter(rank for pair in left for rank in pair)
        worst = max(counts, key=lambda rank: (counts[rank], rank))
        out.append(worst)
        left = [pair for pair in left if worst not in pair]
    return sorted(out)


def check_clocks(probes: Sequence[Sequence[Probe]], hosts: Sequence[str]) -> DoctorFinding:
    """Compares the clocks, as rank 0 sees them, with their median."""
    ahead = [0.0 if rank == 0 else probe.clock_ahead_s for rank, probe in enumerate(probes[0])]
    # With an even number the lower median; with two clocks rank 0's.
    middle = statistics.median_low(ahead) if len(ahead) > 2 else 0.0
    off = [value - middle for value in ahead]
    worst = max(range(len(off)), key=lambda rank: abs(off[rank]))
    remedy = "set the clocks: timedatectl set-ntp true, or chronyc makestep, on that node (chronyc tracking shows it)"
    odd = [rank for rank, value in enumerate(off) if abs(value) > _CLOCK_WARN_S]
    if odd:
        which = "ahead of" if off[worst] > 0 else "behind"
        others = "the others" if len(hosts) > 2 else "rank 0"
        what = f"the clock of {name_ranks([worst], hosts)} is {abs(off[worst]):.1f} s {which} {others}"
        report = failed if abs(off[worst]) > _CLOCK_FAIL_S else warned
        return report("clocks", what, remedy, nodes=blame(odd, hosts), ahead_s=off)
    return passed("clocks", f"within {1000 * abs(off[worst]):.1f} ms of each other", ahead_s=off)


def _ranks(count: int) -> str:
    return f"{count} rank" + ("s" if count > 1 else "")


# --- The folder of runs, seen by all nodes ----------------------------------------------------------------------------


_TOKEN = "PACELINE_DOCTOR_TOKEN"  # set for ranks that we start on other machines


@dataclass(frozen=True)
class LeftToken:
    """Which host wrote the file, and its path."""

    folder: str
    name: str
    writer: str

    def find(self) -> str:
        """Empty if this node sees the file, otherwise the reason."""
        return find_token(Path(self.folder), self.name)

    def remove(self) -> None:
        remove_token(Path(self.folder), self.name)


def leave_token(output_dir: Path) -> LeftToken | None:
    """Write the file into the folder of runs, or its nearest existing parent. None if nothing can be written."""
    whole = output_dir.expanduser().absolute()
    folder = next((place for place in (whole, *whole.parents) if place.is_dir()), Path("/"))
    try:
        name = write_token(folder)
    except OSError:
        return None
    return LeftToken(str(folder), name, socket.gethostname()) if name else None


def read_token() -> LeftToken | None:
    """The file that the starting command has written."""
    text = os.environ.get(_TOKEN)
    return LeftToken(**json.loads(text)) if text else None


def token_variables(token: LeftToken | None) -> dict[str, str]:
    return {_TOKEN: json.dumps(asdict(token))} if token else {}
