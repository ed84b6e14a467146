"""Computes findings from the cells: means for each kind of cell, speed-up and efficiency against one rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.metrics.phases import STEP_PHASES
from paceline.tools.study.collect import Measured
from paceline.tools.study.grid import STRATEGIES
from paceline.tools.study.model import StepModel, fit
from paceline.tools.study.statistics import Estimate, mean, ratio, scaled_serial_fraction, serial_fraction


@dataclass(frozen=True)
class Kind:
    """All repeats of one cell."""

    scaling: str
    strategy: str
    world_size: int
    cells: tuple[Measured, ...]

    @property
    def label(self) -> str:
        return f"{self.strategy.upper()} {self.world_size}" + (" weak" if self.scaling == "weak" else "")

    @property
    def epoch_s(self) -> Estimate:
        return mean([cell.epoch_s for cell in self.cells])

    @property
    def images_per_s(self) -> Estimate:
        return mean([cell.images_per_s for cell in self.cells])

    @property
    def step_s(self) -> Estimate:
        return mean([cell.step_s for cell in self.cells])

    @property
    def peak_mb(self) -> float | None:
        """The peak of the rank with the highest peak."""
        peaks = [max(cell.peak_mb) for cell in self.cells if cell.peak_mb]
        return statistics.fmean(peaks) if peaks else None

    @property
    def accuracy(self) -> Estimate | None:
        return _mean_known([c.test_accuracy if c.test_accuracy is not None else c.val_accuracy for c in self.cells])

    @property
    def val_loss(self) -> Estimate | None:
        return _mean_known([cell.val_loss for cell in self.cells])

    @property
    def phases_s(self) -> dict[str, float | None]:
        """Mean seconds per step of each phase; empty if they were not timed."""
        if not all(cell.phases_s for cell in self.cells):
            return {}
        found: dict[str, float | None] = {}
        for phase in STEP_PHASES:
            values = [cell.phases_s[phase] for cell in self.cells]
            known = [value for value in values if value is not None]
            found[phase] = statistics.fmean(known) if len(known) == len(values) else None
        return found


@dataclass(frozen=True)
class Scaled:
    """A kind of cell, compared with one rank of the same strategy."""

    kind: Kind
    speedup: Estimate  # in images per second
    efficiency: Estimate


@dataclass(frozen=True)
class Findings:
    """The data for the page, the plots and the answers."""

    kinds: tuple[Kind, ...]
    scaled: tuple[Scaled, ...]  # of the kinds that have a cell with one rank to compare with
    models: dict[str, StepModel]
    amdahl: dict[str, float]  # serial fraction by strategy
    gustafson: dict[str, float]

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(kind.strategy for kind in self.kinds))

    def of(self, strategy: str, scaling: str = "strong") -> list[Kind]:
        """By world size. One rank belongs to both kinds of scaling."""
        return [k for k in self.kinds if k.strategy == strategy and (k.scaling == scaling or k.world_size == 1)]

    def scaled_of(self, strategy: str, scaling: str = "strong") -> list[Scaled]:
        return [s for s in self.scaled if s.kind in self.of(strategy, scaling)]

    @property
    def scalings(self) -> list[str]:
        found = [scaling for scaling in ("strong", "weak") if any(k.scaling == scaling for k in self.kinds)]
        if found == ["strong", "weak"] and all(k.world_size == 1 for k in self.kinds if k.scaling == "strong"):
            return ["weak"]
        return found


def find(cells: Sequence[Measured]) -> Findings:
    groups: dict[tuple[str, str, int], list[Measured]] = {}
    for cell in cells:
        groups.setdefault(cell.cell.key, []).append(cell)
    order: dict[str, int] = {name: number for number, name in enumerate(STRATEGIES)}
    keys = sorted(groups, key=lambda key: (key[0], order.get(key[1], len(order)), key[1], key[2]))
    kinds = tuple(Kind(*key, tuple(groups[key])) for key in keys)
    scaled = []
    for kind in kinds:
        alone = next((k for k in kinds if k.strategy == kind.strategy and k.world_size == 1), None)
        if alone is not None:
            scaled.append(_beside(kind, alone))
    strategies = list(dict.fromkeys(kind.strategy for kind in kinds))
    models = {strategy: model for strategy in strategies if (model := fit(cells, strategy)) is not None}
    return Findings(
        kinds,
        tuple(scaled),
        models,
        amdahl=_fractions(scaled, strategies, "strong"),
        gustafson=_fractions(scaled, strategies, "weak"),
    )


def _beside(kind: Kind, alone: Kind) -> Scaled:
    if kind is alone:
        return Scaled(kind, Estimate(1.0), Estimate(1.0))
    speedup = ratio([cell.images_per_s for cell in kind.cells], [cell.images_per_s for cell in alone.cells])
    return Scaled(kind, speedup, speedup.over(kind.world_size))


def _fractions(scaled: Sequence[Scaled], strategies: Sequence[str], scaling: str) -> dict[str, float]:
    law = serial_fraction if scaling == "strong" else scaled_serial_fraction
    found = {}
    for strategy in strategies:
        speedups = {
            s.kind.world_size: s.speedup.value
            for s in scaled
            if s.kind.strategy == strategy and s.kind.scaling == scaling and s.kind.world_size > 1
        }
        fraction = law(speedups)
        if fraction is not None:
            found[strategy] = fraction
    return found


def _mean_known(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None
