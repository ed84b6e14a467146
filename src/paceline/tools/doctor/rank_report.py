"""Rank reports: a rank sends its findings by file, by output line or through the store. Imports no torch."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.runs.folder import write_json
from paceline.tools.doctor.findings import DoctorFinding

TO = "PACELINE_DOCTOR_TO"  # set for ranks that we start: a folder, or "output" for lines of standard output
_MARK = "paceline-doctor: "
_LINE = 800  # characters
DONE = "done"


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
    struck: dict[str, int] = field(default_factory=dict)  # injected faults

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
