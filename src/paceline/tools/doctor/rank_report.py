"""Rank reports: sent by file, by output line or through the store, and combined to one result. Imports no torch."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import paceline
from paceline.runs.folder import write_json
from paceline.tools.doctor.examine import NodeReport
from paceline.tools.doctor.findings import (
    DoctorFinding,
    count_by_status,
    failed,
    is_healthy,
    merge_nodes,
    nodes_to_exclude,
    verdict,
)

TO = "PACELINE_DOCTOR_TO"  # set for ranks that we start: a folder, or "output" for lines of standard output
_MARK = "paceline-doctor: "
_LINE = 800  # characters
DONE = "done"
# --- JSON and Markdown ------------------------------------------------------------------------------------------------


_INCLUDED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|OMP|MKL|CUDA|NVIDIA|PACELINE)_\w+|MASTER_(ADDR|PORT)|SLURM_(JOB|STEP)_\w+"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|COOKIE|AUTH|_KEY|ACCOUNT|USER", re.IGNORECASE)


@dataclass
class RankReport:
    """The report of one rank. It grows while the rank runs."""

    rank: int
    world_size: int
    host: str
    phase: str = "start"  # the current phase; DONE at the end
    node: list[DoctorFinding] | None = None  # part one, from the rank that did it for its node
    facts: dict[str, Any] = field(default_factory=dict)
    shared: list[DoctorFinding] = field(default_factory=list)  # part two; equal on all ranks that got equally far
    hosts: list[str] = field(default_factory=list)  # of all ranks, when known
    fault_counts: dict[str, int] = field(default_factory=dict)  # injected faults

    def to_json(self) -> dict[str, Any]:
        reports = [[finding.to_json() for finding in part] if part is not None else None for part in self._parts()]
        return {**vars(self), "node": reports[0], "shared": reports[1]}

    def _parts(self) -> tuple[list[DoctorFinding] | None, list[DoctorFinding]]:
        return self.node, self.shared

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RankReport:
        node, shared = content["node"], content["shared"]
        return cls(
            **{
                **content,
                "node": None if node is None else [DoctorFinding.from_json(finding) for finding in node],
                "shared": [DoctorFinding.from_json(finding) for finding in shared],
            }
        )


def has_listener() -> bool:
    """Whether the process that started this rank waits for its report."""
    return TO in os.environ


def send_report(report: RankReport) -> None:
    """Send the report to the process that started this rank. A later report replaces an earlier one."""
    to = os.environ[TO]
    if to == "output":
        print("\n".join(_as_lines(report)), flush=True)
    else:
        write_json(Path(to) / f"rank-{report.rank}.json", report.to_json())


def _as_lines(report: RankReport) -> list[str]:
    """Short lines: srun may interleave the output of ranks, but not within a line of this length."""
    text = base64.b64encode(zlib.compress(json.dumps(report.to_json()).encode())).decode()
    parts = [text[start : start + _LINE] for start in range(0, len(text), _LINE)]
    return [f"{_MARK}{report.rank} {number} {len(parts)} {part}" for number, part in enumerate(parts)]


def read_folder(folder: Path) -> list[RankReport]:
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return sorted(map(RankReport.from_json, reports), key=lambda report: report.rank)


def read_lines(lines: Iterable[str]) -> tuple[list[RankReport], list[str]]:
    """The complete reports, and all other lines."""
    parts: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    rest = []
    for line in lines:
        _, mark, text = line.partition(_MARK)
        words = text.split()
        if mark and len(words) == 4:
            rank, number, counts[int(words[0])] = map(int, words[:3])
            parts.setdefault(rank, {})[number] = words[3]
        elif line.strip():
            rest.append(line.rstrip())
    reports = []
    for rank, found in sorted(parts.items()):
        if len(found) == counts[rank]:
            packed = base64.b64decode("".join(found[number] for number in sorted(found)))
            reports.append(RankReport.from_json(json.loads(zlib.decompress(packed))))
    return reports, rest


# --- Combine ----------------------------------------------------------------------------------------------------------


GROUPS = ("SOFTWARE", "MACHINE", "DISK", "NETWORK", "NODES", "RANKS")


@dataclass
class Examination:
    """The complete result of the doctor."""

    findings: list[DoctorFinding]
    hosts: list[str]
    world_size: int
    launcher: str
    facts: dict[str, Any] = field(default_factory=dict)  # by host
    fault_counts: dict[str, int] = field(default_factory=dict)  # how often each injected fault took effect
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
    fault_counts: dict[str, int] = {}
    for report in reports:
        for kind, count in report.fault_counts.items():
            fault_counts[kind] = fault_counts.get(kind, 0) + count
    return Examination(findings, seen, expected.world_size, expected.launcher, facts, fault_counts)


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


# The result as lines on the screen, as JSON, and as Markdown to paste into a ticket. It contains no secrets.
#
# Of the environment it contains only variables of torch, NCCL, gloo, CUDA and the launcher, and none whose name
# suggests a key. The home folder becomes `~`.


def to_json(examination: Examination) -> dict[str, Any]:
    findings = examination.findings
    return {
        "schema": 1,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "paceline": paceline.__version__,
        "healthy": is_healthy(findings),
        "verdict": verdict(findings, examination.seconds),
        "counts": count_by_status(findings),
        "seconds": round(examination.seconds, 2),
        "launcher": examination.launcher,
        "world_size": examination.world_size,
        "hosts": examination.hosts,
        "exclude": nodes_to_exclude(findings, examination.hosts),
        "injected": examination.fault_counts,
        "findings": [finding.to_json() for finding in findings],
        "facts": examination.facts,
    }


def write_markdown(examination: Examination) -> str:
    """A short table; the details are collapsed."""
    content = to_json(examination)
    ranks = f"{examination.world_size} rank{'s' if examination.world_size > 1 else ''}"
    lines = [
        "### paceline doctor",
        "",
        f"**{content['verdict']}**",
        "",
        f"paceline {content['paceline']}, {ranks} by {examination.launcher} on {', '.join(examination.hosts)}, "
        f"{content['time']}",
        "",
        "| | check | found | remedy |",
        "|---|---|---|---|",
    ]
    for finding in sorted(examination.findings, key=lambda one: -one.badness):
        cells = [finding.status, finding.name, finding.what, finding.remedy]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    details = {"command": sys.argv[1:], "environment": _environment(), "facts": content["facts"]}
    details["findings"] = {one.name: one.details for one in examination.findings if one.details}
    text = json.dumps(details, indent=1, default=str)
    lines += ["", "<details><summary>facts</summary>", "", "```json", text, "```", "", "</details>", ""]
    return _without_home("\n".join(lines))


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _INCLUDED.fullmatch(name) and not _SECRET.search(name)
    }


def _without_home(text: str) -> str:
    home = str(Path.home())
    return re.sub(re.escape(home) + r"(?=[/\"'\s]|$)", "~", text) if len(home) > 1 else text


# --- Screen -----------------------------------------------------------------------------------------------------------


_SIGNS = {"pass": "✓", "skip": "-", "warn": "!", "fail": "✗"}
_PLAIN_SIGNS = {"pass": "ok  ", "skip": "skip", "warn": "WARN", "fail": "FAIL"}
_COLOURS = {"pass": "32", "skip": "2", "warn": "33", "fail": "31"}
_NAME = 17
_LEAST_WIDTH, _MOST_WIDTH = 60, 140


class Screen:
    """Uses symbols and colours if the terminal has them, otherwise words."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        encoding = (getattr(self._stream, "encoding", "") or "").lower().replace("-", "")
        is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colour = is_terminal and "NO_COLOR" not in os.environ
        self._signs = _SIGNS if self._has_colour and encoding == "utf8" else _PLAIN_SIGNS
        width = shutil.get_terminal_size((100, 24)).columns
        self._width = max(_LEAST_WIDTH, min(_MOST_WIDTH, width))

    def show(self, findings: Sequence[DoctorFinding]) -> None:
        for line in self.lines(findings):
            print(line, file=self._stream, flush=True)

    def say(self, text: str, status: str = "") -> None:
        print(self._paint(text, _COLOURS.get(status, "1")), file=self._stream, flush=True)

    def lines(self, findings: Sequence[DoctorFinding]) -> Iterator[str]:
        group = None
        for finding in findings:
            if finding.group != group:
                group = finding.group
                yield ""
                yield self._paint(group, "1")
            yield from self._lines_of(finding)

    def _lines_of(self, finding: DoctorFinding) -> Iterator[str]:
        sign = self._signs[finding.status]
        indent = " " * (len(sign) + _NAME + 4)
        head = f"  {self._paint(sign, _COLOURS[finding.status])} {finding.name:<{_NAME}} "
        first, *rest = self._wrap(finding.what, len(indent))
        yield head + first
        yield from (indent + line for line in rest)
        if finding.remedy:
            first, *rest = self._wrap(finding.remedy, len(indent) + 5)
            yield f"{indent}try: {first}"
            yield from (f"{indent}     {line}" for line in rest)

    def _wrap(self, text: str, used: int) -> list[str]:
        return textwrap.wrap(text, self._width - used, break_long_words=False, break_on_hyphens=False) or [""]

    def _paint(self, text: str, colour: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self._has_colour else text
