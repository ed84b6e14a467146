"""The result of a check, and the verdict over all checks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STATUSES = ("pass", "skip", "warn", "fail")  # from the best to the worst
EXIT_FAILED = 1  # exit code of the command if a check failed


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check. `nodes` are the faulty hosts, for the exclude list."""

    name: str
    status: str
    what: str
    remedy: str = ""
    group: str = ""
    nodes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def badness(self) -> int:
        return STATUSES.index(self.status)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": list(self.nodes)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> DoctorFinding:
        return cls(**{**content, "nodes": tuple(content["nodes"])})


def passed(name: str, what: str, **details: Any) -> DoctorFinding:
    return DoctorFinding(name, "pass", what, details=details)


def skipped(name: str, what: str, **details: Any) -> DoctorFinding:
    return DoctorFinding(name, "skip", what, details=details)


def warned(name: str, what: str, remedy: str, *, nodes: Iterable[str] = (), **details: Any) -> DoctorFinding:
    return DoctorFinding(name, "warn", what, remedy, nodes=tuple(nodes), details=details)


def failed(name: str, what: str, remedy: str, *, nodes: Iterable[str] = (), **details: Any) -> DoctorFinding:
    return DoctorFinding(name, "fail", what, remedy, nodes=tuple(nodes), details=details)


def merge_nodes(by_host: dict[str, list[DoctorFinding]]) -> list[DoctorFinding]:
    """Merge the findings of all nodes. A finding of all nodes is listed once; a finding of some names these nodes."""
    merged: list[DoctorFinding] = []
    names = list(dict.fromkeys(finding.name for findings in by_host.values() for finding in findings))
    for name in names:
        alike: dict[tuple[str, str], list[str]] = {}
        samples: dict[tuple[str, str], DoctorFinding] = {}
        for host, findings in by_host.items():
            for finding in findings:
                if finding.name == name:
                    key = _kind(finding)
                    alike.setdefault(key, []).append(host)
                    samples.setdefault(key, finding)
        for key, hosts in alike.items():
            merged.append(_on(samples[key], hosts, len(by_host)))
    return merged


def _kind(finding: DoctorFinding) -> tuple[str, str]:
    """Findings of one kind are merged. Passed checks may differ in their figures; others must have the same text."""
    return finding.status, "" if finding.status == "pass" else finding.what


def _on(finding: DoctorFinding, hosts: list[str], count: int) -> DoctorFinding:
    if count == 1:
        return DoctorFinding(**{**vars(finding), "nodes": tuple(hosts) if finding.badness > 1 else ()})
    where = f"{len(hosts)} nodes" if len(hosts) > 3 or len(hosts) == count else ", ".join(hosts)
    if finding.status == "pass" and len(hosts) > 1:
        where = f"{hosts[0]}; {len(hosts)} nodes pass"
    text = f"{finding.what} ({where})"
    return DoctorFinding(**{**vars(finding), "what": text, "nodes": tuple(hosts) if finding.badness > 1 else ()})


def count_by_status(findings: Sequence[DoctorFinding]) -> dict[str, int]:
    return {status: sum(finding.status == status for finding in findings) for status in STATUSES}


def is_healthy(findings: Sequence[DoctorFinding]) -> bool:
    return not any(finding.status == "fail" for finding in findings)


def nodes_to_exclude(findings: Sequence[DoctorFinding], hosts: Sequence[str]) -> list[str]:
    """The nodes that failed. Empty if all failed: the cause is then elsewhere, and a job needs nodes."""
    blamed = {host for finding in findings if finding.status == "fail" for host in finding.nodes}
    return [host for host in hosts if host in blamed] if not blamed.issuperset(hosts) else []


def verdict(findings: Sequence[DoctorFinding], seconds: float) -> str:
    """The last line of the output."""
    counts = count_by_status(findings)
    took = f"in {seconds:.1f} s"
    warnings = f", {counts['warn']} warning{'s' if counts['warn'] > 1 else ''}" if counts["warn"] else ""
    if counts["fail"] == 0:
        skips = f", {counts['skip']} not tried" if counts["skip"] else ""
        return f"healthy: {counts['pass']} checks passed{warnings}{skips}, {took}"
    names = ", ".join(dict.fromkeys(finding.name for finding in findings if finding.status == "fail"))
    return f"not fit to train: {counts['fail']} of {len(findings)} checks failed ({names}){warnings}, {took}"
