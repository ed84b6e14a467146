"""The settings of the doctor, as data. Imports no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import UserError

KINDS = {
    "clock": "the rank's clock is 100 s ahead",
    "slow": "the rank takes three times as long for every piece of work",
    "wrong": "one bit of the rank's numbers is flipped",
    "versions": "the rank reports another version of torch",
}
_CLOCK_S = 100.0
_WRONG_VERSION = "0.0.0"
Launch = Literal["local", "torchrun", "slurm"]
Device = Literal["auto", "cpu", "cuda"]


# Injects faults, for tests and for demonstration: `--inject "slow rank=1"`. Imports no torch.
#
# Only faults that cannot be caused on a healthy machine. docs/guides/doctor.md explains how to cause the others.


@dataclass(frozen=True)
class InjectedFault:
    kind: str
    rank: int = 0


class InjectedFaults:
    """The injected faults of this rank, and how often each took effect."""

    def __init__(self, faults: tuple[InjectedFault, ...] = (), rank: int = 0) -> None:
        self._kinds = {fault.kind for fault in faults if fault.rank == rank}
        self.fault_counts = dict.fromkeys(sorted(self._kinds), 0)

    def _takes_effect(self, kind: str) -> bool:
        if kind in self._kinds:
            self.fault_counts[kind] += 1
        return kind in self._kinds

    def wall_clock(self) -> float:
        """Seconds since 1970, wrong if the clock fault is injected."""
        return time.time() + (_CLOCK_S if self._takes_effect("clock") else 0.0)

    def version(self, true: str) -> str:
        return _WRONG_VERSION if self._takes_effect("versions") else true

    def slow_down(self, seconds: float) -> None:
        """Call after a piece of work that took this long."""
        if self._takes_effect("slow"):
            until = time.perf_counter() + 2 * seconds
            while time.perf_counter() < until:
                pass

    def flips_a_bit(self) -> bool:
        return self._takes_effect("wrong")


def parse_faults(text: str, where: str = "flag --inject") -> tuple[InjectedFault, ...]:
    return tuple(_parse_fault(part.strip(), where) for part in text.split(";") if part.strip())


def _parse_fault(text: str, where: str) -> InjectedFault:
    kind, *settings = text.split()
    if kind not in KINDS:
        raise UserError(f"unknown fault {kind!r}", where=where, got=text, allowed=", ".join(KINDS))
    rank = 0
    for setting in settings:
        name, _, value = setting.partition("=")
        if name != "rank" or not value.isdecimal():
            raise UserError(f"unknown setting {setting!r} of the fault {kind}", where=where, got=text, allowed="rank=N")
        rank = int(value)
    return InjectedFault(kind, rank)


@dataclass(frozen=True)
class DoctorRequest:
    processes: int = 0  # ranks per node; 0: one per GPU, or without GPUs one per core, at most 4
    device: Device = "auto"
    output_dir: Path = Path("runs")
    data_dir: Path = Path("data")
    faults: tuple[InjectedFault, ...] = ()


@dataclass(frozen=True)
class NodeRole:
    """The node's role in the job, as far as known in advance. It decides how strict the checks are."""

    local_ranks: int = 1
    num_nodes: int = 1
    rendezvous_at: tuple[str, int] | None = None  # host and port of the rendezvous
    serves: bool = False  # this process will listen on that port, so it must be free
