"""What the doctor is asked to look at, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.plant import Plant

LAUNCHES = ("local", "torchrun", "slurm")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Request:
    processes: int = 0  # ranks of each node; 0: one per GPU, else one per core, at most 4
    device: str = "auto"
    output_dir: Path = Path("runs")
    data_dir: Path = Path("data")
    plants: tuple[Plant, ...] = ()


@dataclass(frozen=True)
class Surroundings:
    """What decides how strict a node's checks are: its part in the job, as far as it is known beforehand."""

    local_ranks: int = 1
    num_nodes: int = 1
    meets_at: tuple[str, int] | None = None  # where the ranks are told to meet
    serves: bool = False  # this process will open that port itself, so it must be free
