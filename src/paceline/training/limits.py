"""How close a run came to the limits of its devices, and what limits it: the `limits` of results.json."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.data.pack_format import holds_pixels
from paceline.metrics.ceiling import FlopCount, count_flops, find_ceilings, name_precision
from paceline.metrics.compile_gain import Gain
from paceline.metrics.verdict import LEAST_STEPS, Conditions, RankTime, Speed, judge_run, split_time
from paceline.parallel.collectives import broadcast_text
from paceline.runtime.detect import World
from paceline.runtime.resources import usable_cores
from paceline.training.compiling import learn_from
from paceline.training.components import Components

# Counting the operations of a model takes most of a second, the ceiling about one more. Short runs do neither.
WORTH_COUNTING_S, WORTH_MEASURING_S = 10.0, 20.0
SEVERAL_SIZES = "training inputs had several sizes, so steps have no common arithmetic"
TOO_SHORT = "the run was too short to measure the matrix ceiling"
NO_MEMORY = "no memory was left to measure the matrix ceiling"


def find_limits(components: Components, world: World, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """From the `process_metrics` of every rank. Collective. Runs after the training, so its time does not count."""
    times = [_time_of(entry) for entry in ranks if "step_ms" in entry]
    steps = min((int(entry["steps"]) for entry in ranks if "steps" in entry), default=0)
    if len(times) < len(ranks) or steps < LEAST_STEPS:
        return {"steps": steps, "verdict": None}
    dtype = components.model.autocast_dtype or torch.float32
    seconds = max(float(entry["seconds"]) for entry in ranks)
    done = _measure_arithmetic(components, world, dtype, times, seconds)
    speed = Speed(sum(done.rates) or None, sum(done.ceilings) or None, done.note)
    shares = split_time(times)
    conditions = Conditions(
        config=components.plan.config,
        world=world,
        strategy=components.model.strategy,
        precision=name_precision(dtype, world.device),
        cores=usable_cores(),
        load=os.getloadavg()[0],
        step_ms=max(time.step_ms for time in times),
        is_packed=holds_pixels(Path(components.plan.config.data.data_dir)),
        host_overhead_share=_host_overhead(components),
        is_compiled=components.model.is_compiled,
        is_recorded=components.step.is_recorded,
        compile_gain=_learn_gain(components, world, max(time.step_ms for time in times) / 1000),
    )
    return {
        "steps": steps,
        "precision": conditions.precision,
        "flops_per_sample": done.flops_per_sample,
        "flops_per_s": speed.flops_per_s,
        "ceiling_flops_per_s": speed.ceiling_flops_per_s,
        "mfu": speed.mfu,
        "note": speed.note,
        "data_share": shares.data,
        "communication_share": shares.communication,
        "exchange_share": shares.exchange,
        "host_overhead_share": conditions.host_overhead_share,
        "slowest_to_fastest": shares.slowest_to_fastest,
        "slowest_rank": asdict(shares.slowest) if shares.slowest else None,
        "flops_per_s_by_rank": done.rates,
        "ceiling_flops_per_s_by_rank": done.ceilings,
        "verdict": judge_run(shares, speed, conditions).to_json(),
    }


def _learn_gain(components: Components, world: World, step_s: float) -> Gain | None:
    is_compiled = components.model.is_compiled
    return learn_from(components.plan.config, components.plan, world, step_s=step_s, is_compiled=is_compiled)


def _time_of(entry: dict[str, Any]) -> RankTime:
    phases = entry["breakdown_ms"]
    mean_ms = max(float(entry["step_ms"]["mean"]), 1e-6)
    return RankTime(entry["rank"], entry["host"], mean_ms, phases.get("data") or 0.0, phases.get("communication"))


@dataclass(frozen=True)
class _Arithmetic:
    """Operations per sample, and per second of each rank: reached, and at most. Empty if unknown, with a note."""

    flops_per_sample: int | None = None
    rates: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    note: str = ""


def _measure_arithmetic(
    components: Components, world: World, dtype: torch.dtype, times: list[RankTime], seconds: float
) -> _Arithmetic:
    if seconds < WORTH_COUNTING_S:
        return _Arithmetic(note=TOO_SHORT)
    if len(set(components.plan.training_shapes)) > 1:
        return _Arithmetic(note=SEVERAL_SIZES)
    count = _count_once(components, world)
    if count.per_sample is None:
        return _Arithmetic(note=count.note)
    flops = count.per_sample * components.plan.rank_batch_size
    rates = [1000 * flops / time.step_ms for time in times]
    may_measure = seconds >= WORTH_MEASURING_S
    ceilings = find_ceilings(world, dtype, may_measure=may_measure, surpassed=rates[world.rank])
    if ceilings is None:
        return _Arithmetic(count.per_sample, rates, note=NO_MEMORY if may_measure else TOO_SHORT)
    return _Arithmetic(count.per_sample, rates, ceilings)


def _count_once(components: Components, world: World) -> FlopCount:
    """Only the primary builds the model again and counts. The other ranks get the result."""
    mine = FlopCount(None)
    if world.is_primary:
        mine = count_flops(
            components.plan.config.model, components.plan.largest_shape, components.plan.info.num_classes
        )
    return FlopCount(**json.loads(broadcast_text(json.dumps(asdict(mine)), world)))


def _host_overhead(components: Components) -> float | None:
    """Known only if a GPU was profiled."""
    profiler = components.step.guards.profiler
    busy = profiler.result.device_busy_share if profiler and profiler.result else None
    return None if busy is None else max(0.0, 1.0 - busy)
