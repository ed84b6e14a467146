"""Names, ports and interfaces, before anybody is met."""

from __future__ import annotations

from paceline.doctor.findings import Finding, failed, passed, warned
from paceline.doctor.gather.network import Names, Network, Ports, is_loopback
from paceline.doctor.request import Surroundings

_SLOW_LOOKUP_S = 1.0
_FEW_PORTS = 1000
_HOSTS = "an entry in DNS or in /etc/hosts of every node"


def check_host_name(facts: Names, around: Surroundings) -> Finding:
    if facts.error:
        what = f"{facts.host} (this host) does not resolve: {facts.error}; ranks could not call each other"
        return failed("host name", what, f"{_HOSTS}: 127.0.0.1 {facts.host} will do on a single machine")
    listed = ", ".join(facts.addresses)
    if around.num_nodes > 1 and all(is_loopback(address) for address in facts.addresses):
        what = f"{facts.host} stands for {listed}: other nodes would be told to call themselves"
        return failed("host name", what, "its real address in /etc/hosts, or GLOO_SOCKET_IFNAME=<interface>")
    if facts.lookup_s > _SLOW_LOOKUP_S:
        what = f"{facts.host} is {listed}, but looking it up takes {facts.lookup_s:.1f} s"
        return warned("host name", what, "a DNS server that does not answer? see /etc/resolv.conf")
    return passed("host name", f"{facts.host} is {listed}")


def check_meeting_name(facts: Names) -> Finding | None:
    """The node the ranks are told to meet on; None where they are told nothing yet."""
    if not facts.meets_at:
        return None
    if facts.meeting_error:
        what = f"MASTER_ADDR {facts.meets_at} does not resolve: {facts.meeting_error}"
        return failed("meeting address", what, f"MASTER_ADDR must name rank 0's node; {_HOSTS}")
    return passed("meeting address", f"{facts.meets_at} is {', '.join(facts.meeting_addresses)}")


def check_ports(facts: Ports) -> Finding:
    if not facts.is_open_here:
        remedy = "a firewall on this very host? iptables -L, nft list ruleset; allow what its own address sends itself"
        return failed("ports", f"a port opened here cannot be reached from here: {facts.error}", remedy)
    if facts.port is not None and facts.taken_by is not None:
        what = f"port {facts.port}, on which the ranks are to meet, is taken by {facts.taken_by}"
        return failed("ports", what, "another MASTER_PORT, or end that process")
    if facts.last - facts.first < _FEW_PORTS:
        what = f"the system gives out ports {facts.first}-{facts.last} only"
        return warned("ports", what, "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    if facts.default_taken_by is not None and facts.port is None:
        what = f"torchrun's usual port 29500 is taken by {facts.default_taken_by}; our own launcher takes a free one"
        return warned("ports", what, "torchrun --master-port 29501, or --standalone; or end that process")
    free = f"port {facts.port} is free, " if facts.port is not None else ""
    return passed("ports", f"{free}ports open and answer here")


def check_interfaces(facts: Network) -> Finding:
    """MTUs are compared between nodes later; here it only matters that what was chosen is there."""
    up = {interface.name: interface for interface in facts.interfaces if interface.is_up}
    for variable, value in facts.chosen.items():
        words = [word.lstrip("=") for word in value.split(",") if word and not word.startswith("^")]
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        for word in words:
            if not any(name == word if is_exact else name.startswith(word) for name in up):
                what = f"{variable}={value}, but no interface of that name is up"
                return failed("interfaces", what, f"{variable}=<one of {', '.join(up)}>, or unset it")
    named = [f"{one.name} {one.address} (MTU {one.mtu})" for one in up.values() if one.address and one.name != "lo"]
    return passed("interfaces", ", ".join(named) or "only the loopback: one machine by itself")
