"""A model of the step time, fitted to the cells. It predicts world sizes that were not run.

    step(n, s) = per_sample * s + fixed                              the rank's own work on its s samples
               + [n > 1] * (entry + bandwidth * 2 (n-1)/n + latency * log2 n)    waiting for the others

All coefficients are times and cannot be negative. `entry` is the fixed cost of communication. The other two are the
alpha-beta model of an all-reduce: every rank moves 2 (n-1)/n times the gradients, in a number of rounds that grows with
the logarithm of n. The traffic of a sharded model has the same form. Communication that overlaps with the backward pass
is not included: the cells measure exposed communication, and so does the fit.

The fit uses relative least squares over all repeats, so a short step counts as much as a long one. If a cell has
measured its waiting, work and waiting are fitted separately. Intervals come from refits to the fitted values with the
noise of the cells.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.tools.study.collect import Measured
from paceline.tools.study.statistics import Estimate, student_t

if TYPE_CHECKING:
    import numpy as np

TERMS = ("per_sample", "fixed", "entry", "bandwidth", "latency")
_WORK, _WAITING = slice(0, 2), slice(2, 5)
_DRAWS = 400
_LEAST_NOISE = 0.01  # lower bound: two repeats may agree by chance
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Link:
    """A network between nodes, by its data sheet."""

    bits_per_s: float
    latency_s: float

    def all_reduce_s(self, ranks: int, size_bytes: float) -> float:
        """A ring for the bytes, a tree for the latency. Libraries choose between both and are not slower."""
        if ranks < 2:
            return 0.0
        return 2 * (ranks - 1) / ranks * size_bytes * 8 / self.bits_per_s + 2 * math.log2(ranks) * self.latency_s


@dataclass(frozen=True)
class Prediction:
    world_size: int
    samples_per_rank: float
    step_s: Estimate
    efficiency: Estimate  # against one rank with the same model


@dataclass(frozen=True)
class StepModel:
    """Fitted to one strategy's cells."""

    strategy: str
    coefficients: dict[str, float]
    noise: float  # relative, of one run
    draws: Any  # an array: coefficients of the refits, one column per refit
    residuals: dict[str, float]  # per cell kind, relative
    sizes: tuple[int, ...]  # world sizes it was fitted to
    parameter_bytes: int

    def predict(self, world_size: int, samples_per_rank: float, link: Link | None = None) -> Prediction:
        import numpy as np

        alone = samples_per_rank * world_size
        step = self._step(world_size, samples_per_rank, link)
        single = self._step(1, alone, None)
        # A run outside the fit has its own noise. Efficiency compares two runs with the same work.
        rng = np.random.default_rng(world_size)
        noise = np.exp(rng.normal(0.0, self.noise, step[1].shape))
        return Prediction(
            world_size,
            samples_per_rank,
            _estimate(step[0], step[1] * noise),
            _estimate(single[0] / (world_size * step[0]), single[1] / (world_size * step[1])),
        )

    def _step(self, ranks: int, samples: float, link: Link | None) -> tuple[float, Any]:
        """The seconds of a step, from the fit and from every refit."""
        row = _features(ranks, samples)
        if link is not None and ranks > 1:
            # Another network than in the cells: replace the measured terms by its data sheet.
            row[3] = row[4] = 0.0
            extra = link.all_reduce_s(ranks, self.parameter_bytes)
        else:
            extra = 0.0
        values = [self.coefficients[term] for term in TERMS]
        return sum(a * b for a, b in zip(row, values, strict=True)) + extra, self.draws.T @ row + extra


def fit(cells: Sequence[Measured], strategy: str) -> StepModel | None:
    """None if there are fewer than two kinds of cells."""
    import numpy as np

    mine = [cell for cell in cells if cell.cell.strategy == strategy]
    kinds = {(cell.cell.world_size, cell.samples_per_rank) for cell in mine}
    if len(kinds) < 2:
        return None
    rows: list[list[float]] = []
    targets: list[float] = []
    for cell in mine:
        features = _features(cell.cell.world_size, cell.samples_per_rank)
        waiting = cell.phases_s.get("communication")
        parts = [(features, cell.step_s)]
        if waiting is not None:
            work = [*features[_WORK], 0.0, 0.0, 0.0]
            parts = [(work, cell.step_s - waiting), ([0.0, 0.0, *features[_WAITING]], waiting)]
        for part, seconds in parts:
            if any(part):  # with one rank there is no waiting to fit
                rows.append([value / cell.step_s for value in part])
                targets.append(seconds / cell.step_s)
    design, target = np.array(rows), np.array(targets)
    solve = _solver(design)
    best = solve(target[:, None])[:, 0]
    fitted = design @ best
    noise = _noise(mine, target - fitted, used=int((best > 0).sum()))
    rng = np.random.default_rng(0)
    draws = solve(fitted[:, None] * np.exp(rng.normal(0.0, noise, (len(targets), _DRAWS))))
    return StepModel(
        strategy,
        dict(zip(TERMS, best.tolist(), strict=True)),
        noise,
        draws,
        _residuals(mine, best),
        tuple(sorted({cell.cell.world_size for cell in mine})),
        4 * max(cell.parameters for cell in mine),
    )


def hold_out(cells: Sequence[Measured], strategy: str) -> tuple[Measured, Prediction, float] | None:
    """Predict the largest world size from the smaller ones: measured, predicted, and the relative error.

    Needs three sizes: a fit to one size contains no information about scaling.
    """
    mine = [cell for cell in cells if cell.cell.strategy == strategy]
    sizes = sorted({cell.cell.world_size for cell in mine})
    if len(sizes) < 3:
        return None
    model = fit([cell for cell in mine if cell.cell.world_size < sizes[-1]], strategy)
    if model is None:
        return None
    held = [cell for cell in mine if cell.cell.world_size == sizes[-1]]
    truth_s = statistics.fmean(cell.step_s for cell in held)
    prediction = model.predict(sizes[-1], held[0].samples_per_rank)
    return held[0], prediction, prediction.step_s.value / truth_s - 1


def _features(ranks: int, samples: float) -> list[float]:
    """The factor of each coefficient."""
    if ranks == 1:
        return [samples, 1.0, 0.0, 0.0, 0.0]
    return [samples, 1.0, 1.0, 2 * (ranks - 1) / ranks, math.log2(ranks)]


def _solver(design: np.ndarray) -> Callable[[Any], Any]:
    """Non-negative least squares for many targets at once.

    With five unknowns there are 31 sets of nonzero unknowns. Each is solved without the constraint. The result is the
    best of the solutions that satisfy it.
    """
    import numpy as np

    count = design.shape[1]
    subsets = [list(s) for size in range(1, count + 1) for s in itertools.combinations(range(count), size)]
    inverses = [np.linalg.pinv(design[:, subset]) for subset in subsets]

    def solve(targets: Any) -> Any:
        best = np.full(targets.shape[1], np.inf)
        answer = np.zeros((count, targets.shape[1]))
        for subset, inverse in zip(subsets, inverses, strict=True):
            values = inverse @ targets
            error = ((design[:, subset] @ values - targets) ** 2).sum(0)
            # Sets with fewer terms come first. Larger sets must be better by more than rounding.
            better = (values >= 0).all(0) & (error < best - 1e-12)
            best[better] = error[better]
            answer[:, better] = 0.0
            answer[np.ix_(np.array(subset), np.flatnonzero(better))] = values[:, better]
        return answer

    return solve


def _noise(cells: Sequence[Measured], residuals: Any, used: int) -> float:
    """The relative noise of one run: from the repeats or from the residuals of the fit, whichever is larger."""
    groups: dict[tuple[str, str, int], list[float]] = {}
    for cell in cells:
        groups.setdefault(cell.cell.key, []).append(cell.step_s)
    spreads = [statistics.stdev(group) / statistics.fmean(group) for group in groups.values() if len(group) > 1]
    repeats = math.sqrt(statistics.fmean(spread**2 for spread in spreads)) if spreads else 0.0
    freedom = len(residuals) - used
    left_over = math.sqrt(float((residuals**2).sum()) / freedom) if freedom > 0 else 0.0
    # Few measurements underestimate noise: correct with Student's t.
    careful = student_t(freedom) / 1.96 if freedom > 0 else 1.0
    return max(repeats, left_over * min(careful, 1.5), _LEAST_NOISE)


def _residuals(cells: Sequence[Measured], best: Any) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for cell in cells:
        said = float(
            sum(a * b for a, b in zip(_features(cell.cell.world_size, cell.samples_per_rank), best, strict=True))
        )
        kind = f"{cell.cell.scaling} {cell.cell.world_size}"
        found.setdefault(kind, []).append(said / cell.step_s - 1)
    return {kind: statistics.fmean(values) for kind, values in found.items()}


def _estimate(value: float, draws: Any) -> Estimate:
    import numpy as np

    low, high = np.quantile(draws, _QUANTILES)
    return Estimate(float(value), min(float(low), value), max(float(high), value))
