"""Parses faults to inject: `kill rank=1 step=50; hang rank=0 step=80 phase=backward`.

This file only checks the text. `training/inject.py` injects the faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.settings.small_files import parse_json, read_small

_LARGEST_LEDGER_BYTES = 20_000_000
PHASES = ("start", "data", "forward", "backward", "reduce", "update", "save", "evaluate", "finish")
FLIP = "flip"
GPU_HANG = "gpu-hang"
# What each fault does, and its settings besides rank, step, phase and times.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kill": ("SIGKILL of the rank", ()),
    "hang": ("the rank sleeps for ever", ()),
    "freeze": ("the rank sleeps for ever in C, holding Python's lock", ()),
    GPU_HANG: ("the rank's GPU computes for ever, as in a collective that another rank does not reach", ()),
    "raise": ("an exception", ()),
    "exit": ("the rank leaves with an exit code", ("code",)),
    "slow": ("the rank sleeps in each of a number of steps", ("steps", "seconds")),
    "leak": ("the rank takes memory until it gets no more", ("megabytes",)),
    "oom": ("out of memory whenever a microbatch is larger than this", ("above",)),
    "nan": ("a NaN in the rank's batch", ()),
    "inf-gradient": ("an infinite gradient with a finite loss", ()),
    "spike": ("a finite loss a thousand times too large", ()),
    "stop": ("a stop signal to the rank", ()),
    FLIP: ("one bit of a gradient is flipped; with steps= also in audits", ("steps", "bit", "tensor")),
    "full-disk": ("the next save finds no space", ()),
    "slow-disk": ("the next save takes this long", ("seconds",)),
    "corrupt-latest": ("one bit of the newest checkpoint is flipped", ()),
}
_HIGHEST_BIT = 31  # of a float32; 31 is the sign
_COMMON = ("rank", "step", "phase", "times")
EVERY_RANK = -1


@dataclass(frozen=True)
class Fault:
    """One fault: where it is injected, and how often over all attempts of the run."""

    number: int  # its place in the list, used as its name in the ledger
    kind: str
    step: int
    rank: int = 0
    phase: str = ""
    times: int = 1
    tensor: str = ""  # name of a parameter; empty: the first one
    values: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rank = "every rank" if self.rank == EVERY_RANK else f"rank {self.rank}"
        phase = f", {self.phase}" if self.phase else ""
        return f"{self.kind} ({rank}, step {self.step}{phase})"


def parse_faults(text: str, where: str = "flag --inject") -> tuple[Fault, ...]:
    parts = [part.strip() for part in text.split(";") if part.strip()]
    return tuple(_parse_fault(number, part, where) for number, part in enumerate(parts))


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The injected faults so far, in order. Incomplete or foreign lines are left out."""
    try:
        lines = read_small(path, _LARGEST_LEDGER_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    return [row for line in lines if (row := _parse_row(line))]


def _parse_row(line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError:
        return {}
    is_ours = isinstance(row, dict) and all(type(row.get(name)) is int for name in ("fault", "rank", "attempt"))
    return row if is_ours else {}


def _parse_fault(number: int, text: str, where: str) -> Fault:
    kind, *settings = text.split()
    if kind not in KINDS:
        raise UserError(f"unknown fault {kind!r}", where=where, got=text, allowed=", ".join(KINDS))
    known = (*_COMMON, *KINDS[kind][1])
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known or not value:
            raise UserError(
                f"unknown setting {setting!r} of the fault {kind}",
                where=where,
                got=text,
                allowed=", ".join(f"{word}=" for word in known),
            )
        values[name] = value if name in ("phase", "tensor") else _number(name, value, where, text)
    if "step" not in values:
        raise UserError(f"the fault {kind} needs a step", where=where, got=text, hint=f"{kind} rank=0 step=10")
    if values.get("phase", "data") not in PHASES:
        raise UserError("unknown phase of a fault", where=where, got=text, allowed=", ".join(PHASES))
    return Fault(
        number,
        kind,
        step=int(values.pop("step")),
        rank=int(values.pop("rank", 0)),
        phase=values.pop("phase", ""),
        times=int(values.pop("times", 1)),
        tensor=values.pop("tensor", ""),
        values=values,
    )


def _number(name: str, value: str, where: str, text: str) -> float:
    if name == "rank" and value == "*":
        return EVERY_RANK
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    is_whole = name in (*_COMMON, "bit", "steps")
    if number < 0 or (is_whole and number != int(number)) or (name == "bit" and number > _HIGHEST_BIT):
        allowed = f"0 to {_HIGHEST_BIT}" if name == "bit" else "0 or more; rank=* for every rank"
        raise UserError(f"{name} of a fault is not a number", where=where, got=text, allowed=allowed)
    return number
