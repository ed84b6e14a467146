"""One sentence: what bounds this recipe on this machine, and what to try. A pure function of the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.collectives import Fit, Row
from paceline.bench.data import DataResult
from paceline.bench.links import Limit
from paceline.bench.step import StepResult
from paceline.config.schema import Config
from paceline.metrics.units import format_rate, format_size, format_time
from paceline.world.detect import World

_MUCH = 0.2  # of a step: worth an effort
_LOW_MFU = 0.3


@dataclass(frozen=True)
class Verdict:
    kind: str  # wrong-sums, communication-bound, data-bound, compute-bound, links, data
    text: str


def judge_sums(rows: Sequence[Row]) -> Verdict | None:
    """Speed means nothing when an answer is wrong."""
    wrong = [row for row in rows if not row.is_right]
    if not wrong:
        return None
    first = f"{wrong[0].operation} of {format_size(wrong[0].size_bytes)}"
    return Verdict("wrong-sums", f"wrong sums: {first} gave a wrong answer ({len(wrong)} of {len(rows)} did)")


def judge_step(step: StepResult, config: Config, world: World) -> Verdict:
    whole_s = step.step_s + step.data_s
    data_share = step.data_s / whole_s
    peers_share = (step.exposed_s or 0.0) / whole_s
    if peers_share >= _MUCH and peers_share >= data_share:
        text = f"{peers_share:.0%} of a step ({format_time(step.exposed_s or 0.0)}) goes into exchanging"
        text += f" {format_size(step.gradient_bytes)} of gradients"
        return Verdict("communication-bound", f"communication-bound: {text}; try {_less_talk(config, world)}")
    if data_share >= _MUCH:
        text = f"{data_share:.0%} of a step ({format_time(step.data_s)}) waits for its batch"
        return Verdict("data-bound", f"data-bound: {text}; try {_faster_data(config)}")
    computing = 1 - data_share - peers_share
    at = f", at {step.mfu:.0%} of the matrix ceiling" if step.mfu is not None else ""
    return Verdict(
        "compute-bound",
        f"compute-bound: {computing:.0%} of a step is arithmetic{at}; {_faster_arithmetic(step, config, world)}",
    )


def _less_talk(config: Config, world: World) -> str:
    tips = ["a larger --global-batch-size (gradients are exchanged once per step)"]
    if config.parallel.strategy == "fsdp":
        tips.append("--strategy ddp if the model fits (sharded weights are exchanged too)")
    elif config.parallel.sync_bn:
        tips.append("no --sync-bn")
    if world.device == "cpu":
        tips.append("fewer --processes with more threads each")
    return ", or ".join(tips)


def _faster_data(config: Config) -> str:
    if config.data.dataset == "folder":
        return f"more --num-workers than {config.data.num_workers}, or smaller pictures on disk"
    lighter = {"imagenet": "--augment light or a smaller --image-size", "light": "--augment none"}
    return lighter.get(config.data.augment, "a larger --global-batch-size")


def _faster_arithmetic(step: StepResult, config: Config, world: World) -> str:
    if not world.device.startswith("cuda"):
        return "more cores or a GPU would help, faster links or disks would not"
    tips = []
    if step.precision.startswith("float32"):
        tips.append("mixed precision (leave out --no-amp)")
    if step.mfu is not None and step.mfu < _LOW_MFU:
        tips.append("a larger --global-batch-size")
    if not config.train.compile:
        tips.append("--compile")
    return "try " + ", or ".join(tips) if tips else "little is left to gain here"


def judge_links(rows: Sequence[Row], fits: Sequence[Fit], limit: Limit | None) -> Verdict:
    best = max((row for row in rows if row.operation == rows[0].operation), key=lambda row: row.bus_bytes_per_s)
    text = f"{best.operation} reaches {format_rate(best.bus_bytes_per_s)} at {format_size(best.size_bytes)}"
    if limit is not None and limit.bytes_per_s:
        text += f", {best.bus_bytes_per_s / limit.bytes_per_s:.0%} of the limit"
    fit = next((fit for fit in fits if fit.operation == best.operation), None)
    if fit is not None and fit.bytes_per_s is not None:
        # Where a message takes as long on its way as it takes to set out.
        text += f"; below {format_size(fit.latency_s * fit.bytes_per_s)} latency rules ({format_time(fit.latency_s)})"
    return Verdict("links", f"links: {text}")


def judge_data(data: DataResult) -> Verdict:
    text = f"the pipeline alone delivers {data.samples_per_s:,.0f} images/s, {data.of_copy:.0%} of a plain copy"
    return Verdict("data", f"data: {text}; add --what data,step to see whether a step waits for it")
