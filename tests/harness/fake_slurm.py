"""Stand-ins for Slurm's clients: they write down how they were called and answer what the test told them to."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

# sinfo and sacctmgr, and scontrol about anything but a job, do not answer: the cluster's facts are not known.
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
    """The clients in a folder at the head of PATH. The last answer given holds for all later calls."""

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
        """What the next call that has no answer yet is told, and all after it."""
        self._answers[client] = number = self._answers.get(client, 0) + 1
        text = f"printf '%s\\n' {shlex.quote(out)}\n" if out else ""
        text += f"printf '%s\\n' {shlex.quote(err)} >&2\n" if err else ""
        (self.folder / f"{client}.{number}.sh").write_text(f"{text}exit {code}\n")

    def hang(self, client: str) -> None:
        self._answers[client] = number = self._answers.get(client, 0) + 1
        (self.folder / f"{client}.{number}.sh").write_text("exec sleep 60\n")

    def forget_job(self) -> None:
        """As after the job's end, without accounting."""
        self.answer("squeue", "", err="slurm_load_jobs error: Invalid job id specified", code=1)
        self.answer("scontrol", "", err="slurm_load_jobs error: Invalid job id specified", code=1)
        self.answer("sacct", "", err="Slurm accounting storage is disabled", code=1)

    def calls(self, client: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(f"{client} ") for line in lines if line.startswith(f"{client} ")]


def clean_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of whoever runs the tests, and no traces of a launcher."""
    monkeypatch.setenv("HOME", str(folder))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "PACELINE_"))]:
        monkeypatch.delenv(name)
