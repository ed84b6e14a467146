"""One rank of a benchmark: joins the others, measures, and returns a report with a verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.metrics.screen import format_rate, format_size, format_time
from paceline.metrics.timing import gather_numbers
from paceline.metrics.verdict import DENSE, MUCH, Conditions, faster_arithmetic, faster_data, less_exchange
from paceline.parallel.apply import needs_group, resolve_strategy
from paceline.parallel.collectives import broadcast_text, wait_for_all
from paceline.runtime.detect import RankEnvironment, World
from paceline.runtime.group import prepare_rank, process_group
from paceline.runtime.pulse import Pulse, open_pulse
from paceline.runtime.resources import usable_cores
from paceline.settings.schema import Config
from paceline.tools.bench import collectives
from paceline.tools.bench.collectives import Fit, Row
from paceline.tools.bench.data import DataResult, measure_data
from paceline.tools.bench.limits import Limit, MachineLimits, find_link, measure_copy_bandwidth
from paceline.tools.bench.pictures import PictureStages, measure_pictures
from paceline.tools.bench.request import BenchRequest
from paceline.tools.bench.step import ProfileResult, StepResult, measure_step, profile_steps
from paceline.training.components import Components, build_components
from paceline.training.same_ranks import require_same_ranks

_DATA_TIMES, _STEP_TIMES = 6, 20  # times the seconds for one size of one collective
_BUSY = 0.75  # load per core before the benchmark
_START_S, _PIECE_S = 600.0, 120.0  # for reading data and building a model; for one measurement


@dataclass
class BenchReport:
    """The measurements. Parts that were not requested stay empty."""

    recipe: str
    world: World
    limits: MachineLimits
    rows: list[collectives.Row] = field(default_factory=list)
    fits: list[collectives.Fit] = field(default_factory=list)
    data: DataResult | None = None
    pictures: PictureStages | None = None
    step: StepResult | None = None
    profile: ProfileResult | None = None
    verdict: BenchVerdict | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        world = asdict(self.world)
        del world["rank"], world["local_rank"]
        links = {"rows": [asdict(row) for row in self.rows], "fits": [asdict(fit) for fit in self.fits]}
        return {
            "schema": 1,
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "paceline": paceline.__version__,
            "torch": torch.__version__,
            "recipe": self.recipe,
            "world": {**world, "cores": usable_cores(), "gpu": _gpu_name(self.world)},
            "limits": asdict(self.limits),
            "collectives": links if self.rows else None,
            "data": {**asdict(self.data), "of_copy": self.data.of_copy} if self.data else None,
            "pictures": asdict(self.pictures) if self.pictures else None,
            "step": {**asdict(self.step), "mfu": self.step.mfu} if self.step else None,
            "profile": asdict(self.profile) if self.profile else None,
            "verdict": asdict(self.verdict) if self.verdict else None,
            "notes": self.notes,
        }


ShowPart = Callable[[str, BenchReport], None]  # called with a finished part and the report so far


def run_rank(request: BenchRequest, environment: RankEnvironment, show: ShowPart) -> BenchReport:
    """Measure as this rank, together with all others."""
    with open_pulse(environment.rank, is_supervised=environment.is_supervised, allowed_s=_START_S) as pulse:
        return _join_and_measure(request, environment, show, pulse)


def _join_and_measure(request: BenchRequest, environment: RankEnvironment, show: ShowPart, pulse: Pulse) -> BenchReport:
    config = request.config
    world = prepare_rank(config.parallel, environment)
    with process_group(world, environment, needed=request.needs_recipe and needs_group(config, world)):
        require_same_ranks(config, world)
        return _measure(request, world, pulse, show)


def _measure(request: BenchRequest, world: World, pulse: Pulse, show: ShowPart) -> BenchReport:
    piece_s = _PIECE_S + 5 * _STEP_TIMES * request.seconds_per_size

    def keep_alive(_: object = None, allowed_s: float = piece_s) -> None:
        pulse.beat("start", 0, allowed_s)

    keep_alive()
    wait_for_all(world)  # all ranks measure at the same time: they share the memory bandwidth
    rates = gather_numbers([measure_copy_bandwidth(world.device)], world)
    copy = sum(row[0] for row in rates) / world.world_size
    report = BenchReport(
        request.recipe, world, MachineLimits(copy, find_link(world, copy)), notes=_notes(request, world)
    )
    show("start", report)
    if "collectives" in request.parts and world.world_size > 1:
        measure = partial(collectives.measure, world, request.sizes, on_row=keep_alive)
        report.rows = measure(seconds_per_size=request.seconds_per_size)
        report.fits = collectives.fit_rows(report.rows, world.world_size)
        show("collectives", report)
    if request.needs_recipe:
        keep_alive(allowed_s=_START_S)
        _measure_recipe(request, world, report, keep_alive, show)
    report.verdict = judge(report, request)
    show("verdict", report)
    return report


def _measure_recipe(
    request: BenchRequest, world: World, report: BenchReport, keep_alive: Callable[[], None], show: ShowPart
) -> None:
    components: Components = build_components(
        request.config, world, load_weights=False
    )  # any weights: the time is the same
    keep_alive()
    if "data" in request.parts:
        seconds = _DATA_TIMES * request.seconds_per_size
        report.data = measure_data(components, world, report.limits.copy_bytes_per_s, seconds=seconds)
        keep_alive()
        report.pictures = measure_pictures(components.train_data, world, seconds=seconds)
        show("data", report)
        keep_alive()
    if "step" in request.parts:
        report.step = measure_step(components, world, seconds=_STEP_TIMES * request.seconds_per_size)
        show("step", report)
        keep_alive()
    if request.profile is not None:
        # The folder's name is made from rank 0's clock.
        folder = Path(broadcast_text(str(request.profile), world))
        report.profile = profile_steps(components, world, folder)
        show("profile", report)


def judge(report: BenchReport, request: BenchRequest) -> BenchVerdict | None:
    wrong = judge_sums(report.rows)
    if wrong is not None:
        return wrong
    if report.step is not None:
        return judge_step(report.step, request.config, report.world, cores=usable_cores())
    if report.rows:
        return judge_links(report.rows, report.fits, report.limits.link)
    return judge_data(report.data) if report.data is not None else None


def _notes(request: BenchRequest, world: World) -> list[str]:
    notes = []
    if world.device == "cpu" and world.local_world_size * world.threads > usable_cores():
        notes.append(f"{world.local_world_size} ranks share {usable_cores()} cores: each is slower")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cores:
        notes.append(f"this machine is busy (load {load:.1f} on {cores} cores): times will vary")
    if "collectives" in request.parts and world.world_size == 1:
        notes.append("one rank has no collectives; use --processes 2")
    return notes


def _gpu_name(world: World) -> str | None:
    return torch.cuda.get_device_name(world.device) if world.device.startswith("cuda") else None


# --- What limits this recipe on this machine, in one sentence. Pure functions -----------------------------------------


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
    conditions = Conditions(config, world, strategy, step.precision, cores, step_ms=1000 * step.step_s)
    whole_s = step.step_s + step.data_s
    data_share = step.data_s / whole_s
    peers_share = (step.exposed_s or 0.0) / whole_s
    if peers_share >= MUCH and peers_share >= data_share:
        text = f"{peers_share:.0%} of a step ({format_time(step.exposed_s or 0.0)}) goes into exchanging"
        text += f" {format_size(step.gradient_bytes)} of gradients"
        return _verdict("communication-bound", text, less_exchange(conditions))
    if data_share >= MUCH:
        text = f"{data_share:.0%} of a step ({format_time(step.data_s)}) waits for its batch"
        return _verdict("data-bound", text, faster_data(conditions))
    at = f", at {step.mfu:.0%} of the matrix ceiling" if step.mfu is not None else ""
    text = f"{1 - data_share - peers_share:.0%} of a step is arithmetic{at}"
    is_dense = step.mfu is None or step.mfu >= DENSE
    return _verdict("compute-bound", text, faster_arithmetic(conditions, is_dense=is_dense))


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
