"""The result as JSON, and as Markdown to paste into a ticket. It contains no secrets.

Of the environment it contains only variables of torch, NCCL, gloo, CUDA and the launcher, and none whose name suggests
a key. The home folder becomes `~`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import paceline
from paceline.tools.doctor.assemble import Examination
from paceline.tools.doctor.findings import count_by_status, is_healthy, nodes_to_exclude, verdict

_TOLD = re.compile(
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
        "planted": examination.struck,
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
        name: value for name, value in sorted(os.environ.items()) if _TOLD.fullmatch(name) and not _SECRET.search(name)
    }


def _without_home(text: str) -> str:
    home = str(Path.home())
    return re.sub(re.escape(home) + r"(?=[/\"'\s]|$)", "~", text) if len(home) > 1 else text
