"""The report as lines of text: one table per part, narrow enough for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.metrics.screen import format_flops, format_rate, format_size, format_time, gigabytes
from paceline.tools.bench.collectives import Row, bucket_size_mb
from paceline.tools.bench.data import DataResult
from paceline.tools.bench.session import BenchReport
from paceline.tools.bench.step import ProfileResult, StepResult

_HEAD = f"{'median':>8} {'p95':>8} {'alg':>6} {'bus':>6}"
_NAME = 36  # width of an operator's name


def lines_of(part: str, report: BenchReport) -> list[str]:
    """The lines to print when a part is done."""
    if part == "start":
        return list(_start(report))
    if part == "collectives":
        return list(_collectives(report))
    if part == "data":
        assert report.data is not None
        return [*_data(report.data, report), *_pictures(report)]
    if part == "step":
        assert report.step is not None
        return [*_step(report.step), *_needs(report)]
    if part == "profile":
        assert report.profile is not None
        return list(_profile(report.profile))
    return ["", report.verdict.text] if report.verdict else []


def _start(report: BenchReport) -> Iterator[str]:
    yield f"bench     {report.recipe}: {report.world}"
    for note in report.notes:
        yield f"note      {note}"


def _collectives(report: BenchReport) -> Iterator[str]:
    """One row per size, the operations side by side."""
    operations = list(dict.fromkeys(row.operation for row in report.rows))
    yield ""
    yield "COLLECTIVES" + "  ".join(f"{name:^{len(_HEAD)}}" for name in operations).rstrip()
    yield f"{'size':>9}  " + "  ".join(_HEAD for _ in operations) + "   (GB/s)"
    by_operation = [[row for row in report.rows if row.operation == name] for name in operations]
    for rows in zip(*by_operation, strict=True):
        yield f"{format_size(rows[0].size_bytes):>9}  " + "  ".join(_cells(row) for row in rows)
    for fit in report.fits:
        growth = f" + bytes on the bus / {format_rate(fit.bytes_per_s)}" if fit.bytes_per_s else " for every size"
        yield f"{fit.operation:<14}  time = {format_time(fit.latency_s)}{growth}"
    world = report.world
    bucket_mb = bucket_size_mb(report.fits, world.world_size)
    is_used = world.device.startswith("cuda") or world.num_nodes > 1  # ranks on the CPUs of one node share memory
    if bucket_mb is not None and is_used:
        yield f"buckets         --bucket-cap-mb {bucket_mb}: a tenth of an all-reduce of this size is latency"
    limit = report.limits.link
    if limit is not None and limit.bytes_per_s is not None:
        best = max(row.bus_bytes_per_s for row in report.rows)
        yield f"limit           {format_rate(limit.bytes_per_s)}: {limit.name}; {best / limit.bytes_per_s:.0%} reached"
    elif limit is not None:
        yield f"limit           {limit.name}"


def _cells(row: Row) -> str:
    bus = gigabytes(row.bus_bytes_per_s) if row.is_right else "WRONG"
    return (
        f"{format_time(row.median_s):>8} {format_time(row.p95_s):>8} {gigabytes(row.algorithm_bytes_per_s):>6} {bus:>6}"
    )


def _data(data: DataResult, report: BenchReport) -> Iterator[str]:
    where = "GPU memory" if report.world.device.startswith("cuda") else "memory"
    yield ""
    yield "DATA"
    yield f"pipeline        {data.samples_per_s:,.0f} images/s on {_ranks(report.world.world_size)}"
    yield (
        f"batch           {format_time(data.batch_s)} for {data.rank_batch_size} images per rank, "
        f"p95 {format_time(data.batch_p95_s)}; order {format_time(data.order_s)} per epoch"
    )
    yield (
        f"inputs          {format_rate(data.bytes_per_s)} per rank, {data.of_copy:.0%} of a plain copy in {where} "
        f"({format_rate(data.copy_bytes_per_s)})"
    )


def _pictures(report: BenchReport) -> Iterator[str]:
    found = report.pictures
    if found is not None:
        stages = {"read": found.read_per_s, "decode": found.decode_per_s, "crop": found.crop_per_s}
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in stages.items())
        yield f"pictures/s      {rates}, copy {found.copy_per_s:,.0f}: each alone, {found.threads} threads per rank"


def _needs(report: BenchReport) -> Iterator[str]:
    """What a step needs of encoded pictures, and what the pipeline delivers."""
    if report.pictures is None or report.data is None or report.step is None:
        return
    needed = report.step.rank_batch_size * report.world.world_size / report.step.step_s
    delivered = report.data.samples_per_s
    verdict = "enough" if delivered >= needed else f"{delivered / needed:.0%} of it: a run will wait"
    yield f"pictures        a step needs {needed:,.0f}/s; the pipeline alone delivers {delivered:,.0f}/s, {verdict}"


def _step(step: StepResult) -> Iterator[str]:
    yield ""
    yield "STEP"
    yield (
        f"step            {format_time(step.step_s)}, p95 {format_time(step.step_p95_s)}: "
        f"{step.samples_per_s:,.0f} images/s, {step.rank_batch_size} images per rank, {step.precision}"
    )
    yield (
        f"phases          forward {format_time(step.forward_s)}, backward and exchange "
        f"{format_time(step.backward_s)}, update {format_time(step.update_s)}"
    )
    if step.exposed_s is not None:
        gradients = f"gradients {format_size(step.gradient_bytes)}"
        yield f"communication   {_exposed(step.exposed_s, step.step_s)}; {gradients}"
    yield f"data            {_exposed(step.data_s, step.step_s + step.data_s)}"
    ceiling = f"{format_flops(step.ceiling_flops_per_s)} of a large matrix product"
    if step.flops_per_s is not None:
        yield f"arithmetic      {format_flops(step.flops_per_s)} per rank, MFU {step.mfu:.0%} ({ceiling})"
    else:
        yield f"arithmetic      ceiling {ceiling}"
    if step.note:
        yield f"note            {step.note}"


def _profile(profile: ProfileResult) -> Iterator[str]:
    yield ""
    yield f"PROFILE         {'self time':>{_NAME + 2}} {'share':>6} {'calls':>7}   (rank 0, {profile.steps} steps)"
    for operator in profile.top:
        name = operator.name if len(operator.name) <= _NAME + 6 else operator.name[: _NAME + 5] + "~"
        yield f"  {name:<{_NAME + 6}} {format_time(operator.seconds):>9} {operator.share:>6.0%} {operator.calls:>7,}"
    files = profile.files[0] if len(profile.files) == 1 else f"{profile.files[0]} ... {profile.files[-1]}"
    yield f"traces          {profile.folder}/{files}"
    yield "                open one in https://ui.perfetto.dev (it stays in your browser) or chrome://tracing"


def _exposed(seconds: float, whole_s: float) -> str:
    """Exposed time. A negative value is noise."""
    return f"{format_time(seconds)} exposed, {seconds / whole_s:.0%} of a step" if seconds > 0 else "none exposed"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
