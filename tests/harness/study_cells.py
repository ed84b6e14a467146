"""Invented cells of studies, and their page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.tools.study.answers import answer_all
from paceline.tools.study.collect import Measured
from paceline.tools.study.findings import find
from paceline.tools.study.grid import Cell, StudySpec
from paceline.tools.study.plots import make_charts
from paceline.tools.study.report import write_study_page


def made_cell(size: int, batch: int, step_s: float, waiting_s: float | None = None, repeat: int = 1) -> Measured:
    phases: dict[str, float | None] = {}
    if waiting_s is not None:
        work = step_s - waiting_s
        phases = {"data": 0.0, "forward": work / 3, "backward": work / 3, "communication": waiting_s}
        phases |= {"update": work / 6, "other": work / 6}
    cell = Cell("ddp", size, "strong", repeat, batch)
    return Measured(
        cell, 10 * step_s, step_s, batch / step_s, phases_s=phases, steps_per_epoch=10, parameters=1_000_000,
        peak_mb=(100.0,) * size, val_loss=1.0, test_accuracy=0.7, device="cpu",
    )  # fmt: skip


def sixty_four_cells() -> list[Measured]:
    """Two strategies on eight world sizes, four runs each, with a little noise."""
    cells = []
    for strategy, slowness in (("ddp", 1.0), ("fsdp", 1.4)):
        for size in (1, 2, 4, 8, 16, 32, 64, 128):
            for repeat in (1, 2, 3, 4):
                waiting_s = 0.002 * slowness * (size > 1)
                step_s = (slowness * 0.1 / size + waiting_s) * (1 + 0.01 * repeat)
                found = made_cell(size, 1024, step_s, waiting_s, repeat)
                cells.append(replace(found, cell=Cell(strategy, size, "strong", repeat, 1024)))
    return cells


def write_made_page(path: Path, cells: list[Measured]) -> Path:
    spec = StudySpec("shapes-cnn", "shapes-cnn", (), (1, 2), ("ddp", "fsdp"), 4, "strong", 1024)
    findings = find(cells)
    failed = [("fsdp-8-r2", "rank 3 was killed")]
    return write_study_page(path, spec, findings, cells, answer_all(findings), make_charts(findings), failed)
