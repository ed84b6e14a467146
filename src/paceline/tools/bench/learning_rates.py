"""Tries learning rates on a recipe: one step with each, from small to large, until the loss diverges (Smith, 2015).

Nothing is saved. The losses are means over the whole global batch, so every rank sees the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.parallel.apply import needs_group
from paceline.reports.charts import Chart, Mark, Series, Table
from paceline.reports.page import Section, write_page
from paceline.runtime.detect import RankEnvironment, World
from paceline.runtime.group import prepare_rank, process_group
from paceline.runtime.pulse import Pulse, open_pulse
from paceline.settings.schema import Config
from paceline.tools.bench.data import endless_batches
from paceline.training.components import build_components
from paceline.training.same_ranks import require_same_ranks
from paceline.training.schedule import peak_learning_rate

_SMOOTHING = 0.9  # of the moving average of the losses
_DIVERGED = 3.0  # times the lowest smoothed loss
_EARLY = 0.2  # of the points: a loss that is lowest here has not fallen
_START_S, _STEP_S = 600.0, 300.0
_MOST_ROWS = 16


@dataclass(frozen=True)
class Point:
    """One step."""

    base_lr: float
    loss: float
    smooth_loss: float


@dataclass(frozen=True)
class RateSweep:
    points: Sequence[Point]
    has_diverged: bool

    @property
    def lowest(self) -> Point:
        """The lowest smoothed loss. A rate near it is already too large for a whole run."""
        return min(self.points, key=lambda point: point.smooth_loss)

    @property
    def suggested(self) -> float | None:
        """A tenth of the rate with the lowest loss; None if the loss does not fall."""
        early = self.points[: math.ceil(_EARLY * len(self.points))]
        return None if self.lowest in early else self.lowest.base_lr / 10


def find_rates(config: Config, environment: RankEnvironment, rates: tuple[float, float], steps: int) -> RateSweep:
    """Run the sweep as this rank, together with all others."""
    with open_pulse(environment.rank, is_supervised=environment.is_supervised, allowed_s=_START_S) as pulse:
        world = prepare_rank(config.parallel, environment)
        with process_group(world, environment, needed=needs_group(config, world)):
            require_same_ranks(config, world)
            return sweep(config, world, rates, steps, pulse)


def sweep(
    config: Config, world: World, rates: tuple[float, float], steps: int, pulse: Pulse | None = None
) -> RateSweep:
    """Collective."""
    components = build_components(config, world)
    scale = peak_learning_rate(config.optim, config.train.global_batch_size) / config.optim.base_lr
    low, high = rates
    points: list[Point] = []
    mean, weight = 0.0, 0.0
    for step, batch in zip(range(steps), endless_batches(components), strict=False):
        if pulse is not None:
            pulse.beat("start", step, _STEP_S)
        base_lr = low * (high / low) ** (step / (steps - 1))
        report = components.step.gradients(batch, step, wants_stop=False)
        if not math.isfinite(report.mean_loss) or not math.isfinite(report.grad_norm):
            return RateSweep(points, has_diverged=True)
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * report.mean_loss
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        points.append(Point(base_lr, report.mean_loss, mean / weight))
        if points[-1].smooth_loss > _DIVERGED * min(point.smooth_loss for point in points):
            return RateSweep(points, has_diverged=True)
        components.step.update(step, base_lr * scale, report)
    return RateSweep(points, has_diverged=False)


# --- What is shown


def table_of(found: RateSweep) -> Table:
    """About 16 of the points, evenly spaced."""
    stride = max(1, math.ceil(len(found.points) / _MOST_ROWS))
    rows = [[point.base_lr, point.loss, point.smooth_loss] for point in found.points[::stride]]
    return Table(["base_lr", "loss", "smoothed loss"], rows)


def describe(found: RateSweep, tried: tuple[float, float]) -> str:
    """The answer in one sentence."""
    if found.suggested is None:
        return f"the loss falls at no rate between {tried[0]:g} and {tried[1]:g}: try others with --rates LOW:HIGH"
    end = f"diverges at {found.points[-1].base_lr:.2g}" if found.has_diverged else "does not diverge"
    lowest = f"the loss is lowest at {found.lowest.base_lr:.2g}, and {end}"
    return f"try --base-lr {found.suggested:.2g}: {lowest}"


def write_rates_page(path: Path, recipe: str, found: RateSweep, tried: tuple[float, float]) -> Path:
    rates = [point.base_lr for point in found.points]
    marks = [Mark(found.suggested, "suggested")] if found.suggested is not None else []
    chart = Chart(
        id="learning-rates",
        title="Loss of one step at each learning rate",
        x_label="base_lr",
        y_label="training loss",
        series=[
            Series("loss", [point.loss for point in found.points], rates),
            Series("smoothed", [point.smooth_loss for point in found.points], rates),
        ],
        x_log=True,
        wide=True,
        marks=[*marks, Mark(found.lowest.base_lr, "lowest")],
    )
    sections = [Section("Learning rates", [chart]), Section("Table", [table_of(found)])]
    return write_page(
        path,
        f"Learning rates of {recipe}",
        sections,
        verdict=describe(found, tried),
        footer=f"Written by paceline {paceline.__version__}.",
    )
