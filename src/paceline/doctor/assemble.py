"""Combines the rank reports: one list of findings, nodes to exclude, and missing ranks. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.doctor.examine import NodeReport
from paceline.doctor.findings import Finding, failed, merge_nodes
from paceline.doctor.hand_in import DONE, HandIn

GROUPS = ("SOFTWARE", "MACHINE", "DISK", "NETWORK", "NODES", "RANKS")


@dataclass
class Examination:
    """The complete result of the doctor."""

    findings: list[Finding]
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
    papers: Sequence[HandIn], expected: Expected, node: NodeReport | None = None, host: str = ""
) -> Examination:
    """`node` is the report of part one, if the launcher made it."""
    by_host = {paper.host: paper.node for paper in papers if paper.node is not None}
    facts = {paper.host: paper.facts for paper in papers if paper.facts}
    if node is not None:
        by_host, facts = {host: node.findings}, {host: node.facts}
    findings = merge_nodes(by_host)
    furthest = max(papers, key=lambda paper: (len(paper.shared), -paper.rank), default=None)
    if furthest is not None:
        findings += furthest.shared
    seen = list(dict.fromkeys([*expected.hosts, *by_host, *(paper.host for paper in papers)]))
    findings += _who_is_missing(papers, expected)
    findings.sort(key=lambda finding: GROUPS.index(finding.group))
    struck: dict[str, int] = {}
    for paper in papers:
        for kind, count in paper.struck.items():
            struck[kind] = struck.get(kind, 0) + count
    return Examination(findings, seen, expected.world_size, expected.launcher, facts, struck)


def _who_is_missing(papers: Sequence[HandIn], expected: Expected) -> list[Finding]:
    found = []
    if expected.missing:
        nodes = list(expected.missing)
        what = f"{sys.executable} cannot import paceline on {', '.join(nodes[:8])}: {expected.missing[nodes[0]]}"
        remedy = "install paceline in a folder that all nodes share, or on every node"
        found.append(failed("installation", what, remedy, nodes=nodes))
    stuck = [paper for paper in papers if paper.phase != DONE]
    if stuck:
        places = ", ".join(f"rank {paper.rank} on {paper.host} in {paper.phase}" for paper in stuck[:8])
        remedy = "check the rank whose phase differs from the others; leave its node out (--exclude)"
        found.append(failed("ranks", f"not done within the time limit: {places}", remedy, nodes=_apart(stuck)))
    here = {paper.rank for paper in papers}
    silent = [rank for rank in range(expected.world_size) if rank not in here]
    if silent:
        hosts_seen = {paper.host for paper in papers}
        hosts = [host for host in expected.hosts if host not in hosts_seen]
        where = f" (node {', '.join(hosts)})" if hosts else ""
        said = f": {expected.trouble}" if expected.trouble else ""
        what = f"no report from rank {', '.join(map(str, silent[:16]))}{where}{said}"
        found.append(failed("ranks", what, "check that node: is it up, does Python start, was it killed?", nodes=hosts))
    elif expected.trouble and not stuck:
        found.append(failed("ranks", expected.trouble, "paceline doctor --processes 1 checks this machine alone"))
    return [replace(finding, group="RANKS") for finding in found]


def _apart(stuck: Sequence[HandIn]) -> list[str]:
    """The hosts of ranks whose phase differs, if most ranks are in the same phase."""
    phases = [paper.phase for paper in stuck]
    usual = max(set(phases), key=phases.count)
    alone = [paper.host for paper in stuck if paper.phase != usual]
    return sorted(set(alone)) if 2 * phases.count(usual) > len(phases) else []
