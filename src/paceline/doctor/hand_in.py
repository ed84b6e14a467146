"""What a rank has found, on its way to whoever speaks for all: a file, a line of output, or the store. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.doctor.findings import Finding
from paceline.runs.folder import write_json

TO = "PACELINE_DOCTOR_TO"  # set for ranks we start: a folder, or "output" for a line of it
_MARK = "paceline-doctor: "
DONE = "done"


@dataclass
class HandIn:
    """One rank's paper; it grows as the rank goes on."""

    rank: int
    world_size: int
    host: str
    phase: str = "start"  # what the rank is at; DONE when it got through
    node: list[Finding] | None = None  # part one, from the rank that did it for its node
    facts: dict[str, Any] = field(default_factory=dict)
    shared: list[Finding] = field(default_factory=list)  # part two; the same on all ranks that got equally far
    hosts: list[str] = field(default_factory=list)  # of all ranks, as soon as they are known
    struck: dict[str, int] = field(default_factory=dict)  # planted faults

    def to_json(self) -> dict[str, Any]:
        papers = [[finding.to_json() for finding in part] if part is not None else None for part in self._parts()]
        return {**vars(self), "node": papers[0], "shared": papers[1]}

    def _parts(self) -> tuple[list[Finding] | None, list[Finding]]:
        return self.node, self.shared

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> HandIn:
        node, shared = content["node"], content["shared"]
        return cls(
            **{
                **content,
                "node": None if node is None else [Finding.from_json(finding) for finding in node],
                "shared": [Finding.from_json(finding) for finding in shared],
            }
        )


def has_listener() -> bool:
    """Whether somebody who started this rank waits for its paper."""
    return TO in os.environ


def hand_in(paper: HandIn) -> None:
    """To whoever started this rank. The last word counts."""
    to = os.environ[TO]
    if to == "output":
        print(_MARK + json.dumps(paper.to_json()), flush=True)
    else:
        write_json(Path(to) / f"rank-{paper.rank}.json", paper.to_json())


def read_folder(folder: Path) -> list[HandIn]:
    papers = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return sorted(map(HandIn.from_json, papers), key=lambda paper: paper.rank)


def read_lines(lines: Iterable[str]) -> tuple[list[HandIn], list[str]]:
    """Papers, and everything else that was printed."""
    papers: dict[int, HandIn] = {}
    rest = []
    for line in lines:
        _, mark, text = line.partition(_MARK)
        if mark:
            paper = HandIn.from_json(json.loads(text))
            papers[paper.rank] = paper
        elif line.strip():
            rest.append(line.rstrip())
    return [papers[rank] for rank in sorted(papers)], rest
