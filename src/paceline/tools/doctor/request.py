"""The settings of the doctor, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.tools.doctor.plant import InjectedFault

Launch = Literal["local", "torchrun", "slurm"]
Device = Literal["auto", "cpu", "cuda"]


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
    meets_at: tuple[str, int] | None = None  # host and port of the rendezvous
    serves: bool = False  # this process will listen on that port, so it must be free
