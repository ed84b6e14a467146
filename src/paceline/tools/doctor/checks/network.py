"""Checks of host names, ports and interfaces of one node."""

from __future__ import annotations

from paceline.tools.doctor.findings import Finding, failed, passed, warned
from paceline.tools.doctor.gather.network import Names, Network, Ports, is_loopback
from paceline.tools.doctor.request import Surroundings

_SLOW_LOOKUP_S = 1.0
_FEW_PORTS = 1000
_HOSTS = "add it to DNS or to /etc/hosts on every node"


def check_host_name(facts: Names, around: Surroundings) -> Finding:
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


def check_meeting_name(facts: Names) -> Finding | None:
    """Checks MASTER_ADDR. None if it is not set yet."""
    if not facts.meets_at:
        return None
    if facts.meeting_error:
        what = f"MASTER_ADDR {facts.meets_at} does not resolve: {facts.meeting_error}"
        return failed("meeting address", what, f"MASTER_ADDR must name rank 0's node; {_HOSTS}")
    return passed("meeting address", f"{facts.meets_at} is {', '.join(facts.meeting_addresses)}")


def check_ports(facts: Ports) -> Finding:
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


def check_interfaces(facts: Network) -> Finding:
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
