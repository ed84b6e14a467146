"""Fake Slurm clients. They record their calls and return the answers that the test has set."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

# sinfo and sacctmgr, and scontrol except for jobs, fail: the cluster's facts are unknown.
CLIENTS = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo", "sacctmgr")
_CLIENT = """\
#!/bin/sh
here={folder}
case "{name} $*" in "scontrol "*"show "[cpf]*) exit 1 ;; esac
echo "{name} $*" >>"$here/calls"
number=$(grep -c "^{name} " "$here/calls")
while [ "$number" -gt 1 ] && [ ! -e "$here/{name}.$number.sh" ]; do number=$((number - 1)); done
. "$here/{name}.$number.sh"
"""


class FakeSlurm:
    """The clients in the first folder of PATH. The last answer is used for all later calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._answers: dict[str, int] = {}
        folder.mkdir()
        for name in CLIENTS:
            client = folder / name
            client.write_text(_CLIENT.format(folder=shlex.quote(str(folder)), name=name))
            client.chmod(0o755)
            (folder / f"{name}.1.sh").write_text("exit 1\n")
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        self.answer("sbatch", "4711")
        self.answer("scancel", "")

    def answer(self, client: str, out: str, *, err: str = "", code: int = 0) -> None:
        """Set the answer of the next call without an answer, and of all later calls."""
        self._answers[client] = number = self._answers.get(client, 0) + 1
        text = f"printf '%s\\n' {shlex.quote(out)}\n" if out else ""
        text += f"printf '%s\\n' {shlex.quote(err)} >&2\n" if err else ""
        (self.folder / f"{client}.{number}.sh").write_text(f"{text}exit {code}\n")

    def hang(self, client: str) -> None:
        self._answers[client] = number = self._answers.get(client, 0) + 1
        (self.folder / f"{client}.{number}.sh").write_text("exec sleep 60\n")

    def forget_job(self) -> None:
        """Answer as after the job's end, without accounting."""
        self.answer("squeue", "", err="slurm_load_jobs error: Invalid job id specified", code=1)
        self.answer("scontrol", "", err="slurm_load_jobs error: Invalid job id specified", code=1)
        self.answer("sacct", "", err="Slurm accounting storage is disabled", code=1)

    def calls(self, client: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(f"{client} ") for line in lines if line.startswith(f"{client} ")]


def clean_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the profile of the user who runs the tests, and variables of a launcher."""
    monkeypatch.setenv("HOME", str(folder))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "PACELINE_"))]:
        monkeypatch.delenv(name)
