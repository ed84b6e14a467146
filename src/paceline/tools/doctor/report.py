"""The result as lines on the screen, as JSON, and as Markdown to paste into a ticket. It contains no secrets.

Of the environment it contains only variables of torch, NCCL, gloo, CUDA and the launcher, and none whose name suggests
a key. The home folder becomes `~`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import paceline
from paceline.tools.doctor.findings import DoctorFinding, count_by_status, is_healthy, nodes_to_exclude, verdict
from paceline.tools.doctor.rank_report import Examination

# --- JSON and Markdown ------------------------------------------------------------------------------------------------


_INCLUDED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|OMP|MKL|CUDA|NVIDIA|PACELINE)_\w+|MASTER_(ADDR|PORT)|SLURM_(JOB|STEP)_\w+"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|COOKIE|AUTH|_KEY|ACCOUNT|USER", re.IGNORECASE)


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
        "planted": examination.fault_counts,
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
