"""Combines the rank reports: one list of findings, nodes to exclude, and missing ranks. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.tools.doctor.examine import NodeReport
from paceline.tools.doctor.findings import DoctorFinding, failed, merge_nodes
from paceline.tools.doctor.rank_report import DONE, RankReport

GROUPS = ("SOFTWARE", "MACHINE", "DISK", "NETWORK", "NODES", "RANKS")


@dataclass
class Examination:
    """The complete result of the doctor."""

    findings: list[DoctorFinding]
    hosts: list[str]
    world_size: int
    launcher: str
    facts: dict[str, Any] = field(default_factory=dict)  # by host
    struck: dict[str, int] = field(default_factory=dict)  # how often each injected fault took effect
    seconds: float = 0.0


@dataclass(frozen=True)
class Expected:
    """The ranks and nodes that should report."""

    world_size: int
    launcher: str
    hosts: tuple[str, ...] = ()  # of the nodes, if known in advance
    trouble: str = ""  # the error message of the launcher
    missing: Mapping[str, str] = field(default_factory=dict)  # nodes on which paceline cannot start, and why


def assemble(
    reports: Sequence[RankReport], expected: Expected, node: NodeReport | None = None, host: str = ""
) -> Examination:
    """`node` is the report of part one, if the launcher made it."""
    by_host = {report.host: report.node for report in reports if report.node is not None}
    facts = {report.host: report.facts for report in reports if report.facts}
    if node is not None:
        by_host, facts = {host: node.findings}, {host: node.facts}
    findings = merge_nodes(by_host)
    furthest = max(reports, key=lambda report: (len(report.shared), -report.rank), default=None)
    if furthest is not None:
        findings += furthest.shared
    seen = list(dict.fromkeys([*expected.hosts, *by_host, *(report.host for report in reports)]))
    findings += _who_is_missing(reports, expected)
    findings.sort(key=lambda finding: GROUPS.index(finding.group))
    struck: dict[str, int] = {}
    for report in reports:
        for kind, count in report.struck.items():
            struck[kind] = struck.get(kind, 0) + count
    return Examination(findings, seen, expected.world_size, expected.launcher, facts, struck)


def _who_is_missing(reports: Sequence[RankReport], expected: Expected) -> list[DoctorFinding]:
    found = []
    if expected.missing:
        nodes = list(expected.missing)
        what = f"{sys.executable} cannot import paceline on {', '.join(nodes[:8])}: {expected.missing[nodes[0]]}"
        remedy = "install paceline in a folder that all nodes share, or on every node"
        found.append(failed("installation", what, remedy, nodes=nodes))
    stuck = [report for report in reports if report.phase != DONE]
    if stuck:
        places = ", ".join(f"rank {report.rank} on {report.host} in {report.phase}" for report in stuck[:8])
        remedy = "check the rank whose phase differs from the others; leave its node out (--exclude)"
        found.append(failed("ranks", f"not done within the time limit: {places}", remedy, nodes=_apart(stuck)))
    here = {report.rank for report in reports}
    silent = [rank for rank in range(expected.world_size) if rank not in here]
    if silent:
        hosts_seen = {report.host for report in reports}
        hosts = [host for host in expected.hosts if host not in hosts_seen]
        where = f" (node {', '.join(hosts)})" if hosts else ""
        said = f": {expected.trouble}" if expected.trouble else ""
        what = f"no report from rank {', '.join(map(str, silent[:16]))}{where}{said}"
        found.append(failed("ranks", what, "check that node: is it up, does Python start, was it killed?", nodes=hosts))
    elif expected.trouble and not stuck:
        found.append(failed("ranks", expected.trouble, "paceline doctor --processes 1 checks this machine alone"))
    return [replace(finding, group="RANKS") for finding in found]


def _apart(stuck: Sequence[RankReport]) -> list[str]:
    """The hosts of ranks whose phase differs, if most ranks are in the same phase."""
    phases = [report.phase for report in stuck]
    usual = max(set(phases), key=phases.count)
    alone = [report.host for report in stuck if report.phase != usual]
    return sorted(set(alone)) if 2 * phases.count(usual) > len(phases) else []
