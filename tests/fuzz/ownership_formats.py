"""Records of the owner of a run and its checkpoints. A forged one may name any process: none gets a signal."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from fuzz.mutations import mutate_json, mutate_json_lines
from fuzz.run_formats import LIST, ONE, STATUS, build_finished, build_running
from fuzz.sandbox import Format, Reader
from paceline.runs import lock
from paceline.runs.folder import RunFolder
from paceline.runs.linked_checkpoints import MARK, claim_linked_checkpoints, refuse_checkpoints_of_another_run
from paceline.runs.machine import Machine
from paceline.runs.members import MEMBERS, drop_dead_members
from paceline.runs.owner import this_process
from paceline.settings.faults import read_ledger

_RECORD = f"{ONE}/{MEMBERS}/rank.json"


class _Watched(Machine):
    """This machine with a clock that only sleep advances. A signal is an error."""

    def __init__(self) -> None:
        self._passed_s = 0.0

    def now_s(self) -> float:
        return self._passed_s

    def sleep(self, seconds: float) -> None:
        self._passed_s += max(seconds, 5.0)

    def file_clock_ns(self, folder: Path) -> int:
        return super().file_clock_ns(folder) + int(self._passed_s * 1e9)

    def kill(self, pid: int, start: str) -> None:
        raise AssertionError(f"a signal to process {pid}")


def _build_members(samples: Path, folder: Path) -> None:
    """A dead rank of a dead owner."""
    build_running(samples, folder)
    rank = replace(this_process(), process_start="1", id="before")
    (folder / _RECORD).parent.mkdir()
    (folder / _RECORD).write_text(rank.to_json())


def _take_over(folder: Path) -> None:
    with lock.owned(folder / ONE / "run.lock", _Watched()):
        pass


def _drop(folder: Path) -> None:
    drop_dead_members(folder / ONE, _Watched())


def _build_mark(samples: Path, folder: Path) -> None:
    """A run folder whose checkpoints are on another disk."""
    build_finished(samples, folder)
    (folder / ONE / "checkpoints").rename(folder / "elsewhere")
    (folder / ONE / "checkpoints").symlink_to(os.path.relpath(folder / "elsewhere", folder / ONE))
    words = {"folder": str(folder.parent / "case" / ONE), "inode": 1, "host": "another"}
    (folder / "elsewhere" / MARK).write_text(json.dumps(words))


def _build_ledger(samples: Path, folder: Path) -> None:
    build_finished(samples, folder)


def _read_ledger(folder: Path) -> None:
    """Like a rank and the supervisor read it."""
    for row in read_ledger(RunFolder(folder / ONE).path / "faults.jsonl"):
        assert {row["rank"], row["fault"], row["attempt"]}


FORMATS = (
    Format(
        "run/.members",
        _build_members,
        _RECORD,
        mutate_json,
        (
            Reader("resume", _take_over, changes_folder=True),
            Reader("start beside an owner", lambda folder: RunFolder(folder / ONE).refuse_if_owned()),
            Reader("the end of an owner", _drop, changes_folder=True),
            LIST,
            STATUS,
        ),
    ),
    Format(
        "run/checkpoints of another folder",
        _build_mark,
        f"elsewhere/{MARK}",
        mutate_json,
        (
            Reader("start", lambda folder: refuse_checkpoints_of_another_run(folder / ONE)),
            Reader("own", lambda folder: claim_linked_checkpoints(folder / ONE), changes_folder=True),
        ),
    ),
    Format(
        "run/injected faults",
        _build_ledger,
        f"{ONE}/faults.jsonl",
        mutate_json_lines,
        (Reader("resume", _read_ledger),),
    ),
)
