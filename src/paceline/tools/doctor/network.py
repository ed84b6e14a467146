"""Host names, ports and interfaces of this node. Uses local calls and name lookups only. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.tools.doctor.findings import DoctorFinding, failed, passed, warned
from paceline.tools.doctor.request import NodeRole

# --- Facts ------------------------------------------------------------------------------------------------------------


_NET = Path("/sys/class/net")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LISTENING = "0A"
_CONNECT_S = 3.0
_DEFAULT_PORT = 29500  # torchrun's
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Names:
    host: str
    addresses: tuple[str, ...]  # of the host's own name
    error: str
    lookup_s: float
    rendezvous_at: str = ""  # MASTER_ADDR
    rendezvous_addresses: tuple[str, ...] = ()
    rendezvous_error: str = ""


@dataclass(frozen=True)
class Ports:
    is_open_here: bool  # a port can be opened, and reached through this host's own address
    error: str
    port: int | None  # MASTER_PORT, if it must be free on this node
    taken_by: str | None  # None: the port is free
    default_taken_by: str | None
    first: int  # of the ephemeral port range
    last: int


@dataclass(frozen=True)
class Interface:
    name: str
    address: str
    mtu: int
    is_up: bool


@dataclass(frozen=True)
class Network:
    interfaces: tuple[Interface, ...]
    chosen: dict[str, str]  # interface variables that are set


def gather_names(rendezvous_at: str = "") -> Names:
    host, started = socket.gethostname(), time.perf_counter()
    addresses, error = resolve(host)
    lookup_s = time.perf_counter() - started
    addresses_there, rendezvous_error = resolve(rendezvous_at) if rendezvous_at else ((), "")
    return Names(host, addresses, error, lookup_s, rendezvous_at, addresses_there, rendezvous_error)


def resolve(name: str) -> tuple[tuple[str, ...], str]:
    """Addresses, and the error if there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return (), error.strerror or str(error)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found)), ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def gather_ports(address: str, port: int | None) -> Ports:
    """`port` must be free on this node; None if it is used on another node."""
    error = _try_own_port(address)
    low, high = 32768, 60999
    with suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return Ports(
        is_open_here=not error,
        error=error,
        port=port,
        taken_by=who_has(port) if port else None,
        default_taken_by=who_has(_DEFAULT_PORT),
        first=low,
        last=high,
    )


def _try_own_port(address: str) -> str:
    """Open a free port and connect to it."""
    try:
        with socket.create_server(("", 0)) as server:
            place = (address, server.getsockname()[1])
            socket.create_connection(place, timeout=_CONNECT_S).close()
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""


def who_has(port: int) -> str | None:
    """None if the port is free, otherwise the process that listens there, if it is visible."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # remains of closed connections do not count
            probe.bind(("", port))
            return None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return error.strerror or str(error)
    return _find_listener(port) or "a process of another user"


def _find_listener(port: int) -> str:
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(handle.readlink()) in sockets for handle in (folder / "fd").iterdir()):
                return f"process {folder.name} ({(folder / 'comm').read_text().strip()})"
    return ""


def gather_network(net: Path = _NET) -> Network:
    interfaces = []
    for folder in sorted(net.glob("*")):
        with suppress(OSError, ValueError):
            flags = int((folder / "flags").read_text(), 16)
            mtu = int((folder / "mtu").read_text())
            interfaces.append(Interface(folder.name, address_of(folder.name), mtu, bool(flags & 1)))
    chosen = {name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}
    return Network(tuple(interfaces), chosen)


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, or an empty text."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def own_address(towards: str = "") -> str:
    """This node's address for others: of the chosen interface, of its host name, or of the route to another node."""
    for name in INTERFACE_VARIABLES:
        address = address_of(os.environ.get(name, "").lstrip("=").split(",")[0])
        if address:
            return address
    for address in resolve(socket.gethostname())[0]:
        if not is_loopback(address):
            return address
    if towards:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # UDP: nothing is sent; the system only chooses a route
            return str(probe.getsockname()[0])
    return "127.0.0.1"


# --- Checks -----------------------------------------------------------------------------------------------------------


_SLOW_LOOKUP_S = 1.0
_FEW_PORTS = 1000
_HOSTS = "add it to DNS or to /etc/hosts on every node"


def check_host_name(facts: Names, around: NodeRole) -> DoctorFinding:
    if facts.error:
        what = f"{facts.host} (this host) does not resolve: {facts.error}; ranks could not connect to each other"
        return failed("host name", what, f"{_HOSTS}; on a single machine: 127.0.0.1 {facts.host}")
    listed = ", ".join(facts.addresses)
    if around.num_nodes > 1 and all(is_loopback(address) for address in facts.addresses):
        what = f"{facts.host} resolves to {listed}: other nodes would connect to themselves"
        return failed("host name", what, "put its real address into /etc/hosts, or set GLOO_SOCKET_IFNAME=<interface>")
    if facts.lookup_s > _SLOW_LOOKUP_S:
        what = f"{facts.host} is {listed}, but the lookup takes {facts.lookup_s:.1f} s"
        return warned("host name", what, "does a DNS server not answer? see /etc/resolv.conf")
    return passed("host name", f"{facts.host} is {listed}")


def check_rendezvous_name(facts: Names) -> DoctorFinding | None:
    """Checks MASTER_ADDR. None if it is not set yet."""
    if not facts.rendezvous_at:
        return None
    if facts.rendezvous_error:
        what = f"MASTER_ADDR {facts.rendezvous_at} does not resolve: {facts.rendezvous_error}"
        return failed("rendezvous address", what, f"MASTER_ADDR must name rank 0's node; {_HOSTS}")
    return passed("rendezvous address", f"{facts.rendezvous_at} is {', '.join(facts.rendezvous_addresses)}")


def check_ports(facts: Ports) -> DoctorFinding:
    if not facts.is_open_here:
        remedy = "is there a firewall on this host? iptables -L, nft list ruleset; allow connections to its own address"
        return failed("ports", f"a port opened here cannot be reached from here: {facts.error}", remedy)
    if facts.port is not None and facts.taken_by is not None:
        what = f"port {facts.port}, the MASTER_PORT of the ranks, is used by {facts.taken_by}"
        return failed("ports", what, "use another MASTER_PORT, or end that process")
    if facts.last - facts.first < _FEW_PORTS:
        what = f"the system has only the ephemeral ports {facts.first}-{facts.last}"
        return warned("ports", what, "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    if facts.default_taken_by is not None and facts.port is None:
        what = f"torchrun's default port 29500 is used by {facts.default_taken_by}; our own launcher takes a free one"
        return warned("ports", what, "torchrun --master-port 29501, or --standalone; or end that process")
    free = f"port {facts.port} is free, " if facts.port is not None else ""
    return passed("ports", f"{free}ports can be opened and reached here")


def check_interfaces(facts: Network) -> DoctorFinding:
    """Checks that chosen interfaces exist. MTUs are compared between nodes later."""
    up = {interface.name: interface for interface in facts.interfaces if interface.is_up}
    for variable, value in facts.chosen.items():
        words = [word.lstrip("=") for word in value.split(",") if word and not word.startswith("^")]
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        for word in words:
            if not any(name == word if is_exact else name.startswith(word) for name in up):
                what = f"{variable}={value}, but no interface of that name is up"
                return failed("interfaces", what, f"{variable}=<one of {', '.join(up)}>, or unset it")
    named = [f"{one.name} {one.address} (MTU {one.mtu})" for one in up.values() if one.address and one.name != "lo"]
    return passed("interfaces", ", ".join(named) or "only loopback: enough for one machine")
