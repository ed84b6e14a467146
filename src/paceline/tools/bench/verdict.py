"""The verdict in one sentence: what limits this recipe on this machine, and what to try. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.metrics.units import format_rate, format_size, format_time
from paceline.metrics.verdict import DENSE, MUCH, Setting, faster_arithmetic, faster_data, less_exchange
from paceline.parallel.apply import resolve_strategy
from paceline.runtime.detect import World
from paceline.settings.schema import Config
from paceline.tools.bench.collectives import Fit, Row
from paceline.tools.bench.data import DataResult
from paceline.tools.bench.limits import Limit
from paceline.tools.bench.step import StepResult


@dataclass(frozen=True)
class BenchVerdict:
    kind: str  # wrong-sums, communication-bound, data-bound, compute-bound, links, data
    text: str


def judge_sums(rows: Sequence[Row]) -> BenchVerdict | None:
    """Wrong results come before any speed."""
    wrong = [row for row in rows if not row.is_right]
    if not wrong:
        return None
    first = f"{wrong[0].operation} of {format_size(wrong[0].size_bytes)}"
    return BenchVerdict("wrong-sums", f"wrong sums: {first} gave a wrong result ({len(wrong)} of {len(rows)} did)")


def judge_step(step: StepResult, config: Config, world: World, *, cores: int) -> BenchVerdict:
    strategy = resolve_strategy(config, world.world_size)
    setting = Setting(config, world, strategy, step.precision, cores, step_ms=1000 * step.step_s)
    whole_s = step.step_s + step.data_s
    data_share = step.data_s / whole_s
    peers_share = (step.exposed_s or 0.0) / whole_s
    if peers_share >= MUCH and peers_share >= data_share:
        text = f"{peers_share:.0%} of a step ({format_time(step.exposed_s or 0.0)}) goes into exchanging"
        text += f" {format_size(step.gradient_bytes)} of gradients"
        return _verdict("communication-bound", text, less_exchange(setting))
    if data_share >= MUCH:
        text = f"{data_share:.0%} of a step ({format_time(step.data_s)}) waits for its batch"
        return _verdict("data-bound", text, faster_data(setting))
    at = f", at {step.mfu:.0%} of the matrix ceiling" if step.mfu is not None else ""
    text = f"{1 - data_share - peers_share:.0%} of a step is arithmetic{at}"
    is_dense = step.mfu is None or step.mfu >= DENSE
    return _verdict("compute-bound", text, faster_arithmetic(setting, is_dense=is_dense))


def _verdict(kind: str, text: str, tips: list[str]) -> BenchVerdict:
    return BenchVerdict(kind, f"{kind}: {text}; try {', or '.join(tips)}")


def judge_links(rows: Sequence[Row], fits: Sequence[Fit], limit: Limit | None) -> BenchVerdict:
    best = max((row for row in rows if row.operation == rows[0].operation), key=lambda row: row.bus_bytes_per_s)
    text = f"{best.operation} reaches {format_rate(best.bus_bytes_per_s)} at {format_size(best.size_bytes)}"
    if limit is not None and limit.bytes_per_s:
        text += f", {best.bus_bytes_per_s / limit.bytes_per_s:.0%} of the limit"
    fit = next((fit for fit in fits if fit.operation == best.operation), None)
    if fit is not None and fit.bytes_per_s is not None:
        # At this size, transfer time and latency are equal.
        text += (
            f"; below {format_size(fit.latency_s * fit.bytes_per_s)} latency dominates ({format_time(fit.latency_s)})"
        )
    return BenchVerdict("links", f"links: {text}")


def judge_data(data: DataResult) -> BenchVerdict:
    text = f"the pipeline alone delivers {data.samples_per_s:,.0f} images/s, {data.of_copy:.0%} of a plain copy"
    return BenchVerdict("data", f"data: {text}; add --what data,step to see whether a step waits for it")
