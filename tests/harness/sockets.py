"""Free ports, and the listening sockets of processes, from /proc."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"


def free_port() -> int:
    """A port without a listener at this moment."""
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def port_for_a_gang() -> int:
    """The first attempt uses the next port."""
    return free_port() - 1


def listening_addresses(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Address and port of every listening TCP socket of these processes, including IPv6."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = []
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        with suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and fields[9] in inodes:
                    address, _, port = fields[1].partition(":")
                    found.append((_readable(address, family), int(port, 16)))
    return sorted(found)


def beyond_loopback(addresses: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(host, port) for host, port in addresses if not ipaddress.ip_address(host).is_loopback]


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    with suppress(OSError):  # the process has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes


def _readable(text: str, family: socket.AddressFamily) -> str:
    """The kernel writes an address as 32-bit words in the byte order of the machine."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))
