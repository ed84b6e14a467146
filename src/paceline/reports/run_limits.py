"""The page section about device limits: how close a run came to them."""

from __future__ import annotations

from typing import Any

from paceline.metrics.units import format_flops, format_time
from paceline.reports.charts import Table
from paceline.reports.page import Block, Details, Tile
from paceline.reports.run_files import RunFiles


def limit_tile(run: RunFiles) -> Tile | None:
    limits = _limits(run)
    if limits.get("mfu") is None:
        return None
    done, ceiling = format_flops(limits["flops_per_s"]), format_flops(limits["ceiling_flops_per_s"])
    return Tile("of the matrix ceiling", f"{limits['mfu']:.0%}", f"{done} of {ceiling}")


def limit_blocks(run: RunFiles) -> list[Block]:
    """The verdict, its figures, and the operators of a profile."""
    limits = _limits(run)
    verdict = limits.get("verdict") or {}
    blocks: list[Block] = []
    if verdict:
        kind, text = str(verdict["kind"]), str(verdict["text"])
        blocks.append(f"**{kind}**{text.removeprefix(kind)}. Next: {verdict['try']}.")
    rows = [[name, value] for name, value in _figures(limits).items() if value is not None]
    if rows:
        steps = f"Limits, over {limits['steps']:,} steps of the last attempt"
        blocks.append(Table(["figure", "value"], rows, steps))
    return [*blocks, *_operators(run.results.get("profile"))]


def _limits(run: RunFiles) -> dict[str, Any]:
    found = run.results.get("limits")
    return found if isinstance(found, dict) else {}


def _figures(limits: dict[str, Any]) -> dict[str, str | None]:
    flops, done, ceiling = (limits.get(key) for key in ("flops_per_sample", "flops_per_s", "ceiling_flops_per_s"))
    ratio = limits.get("slowest_to_fastest")
    return {
        "operations per sample, forward and backward": f"{flops / 1e9:,.3g} GFLOP" if flops else None,
        "achieved, all ranks": format_flops(done) if done else None,
        f"matrix ceiling, all ranks, {limits.get('precision')}": format_flops(ceiling) if ceiling else None,
        "share of the ceiling (MFU)": _percent(limits.get("mfu")),
        "a step's time: waiting for data": _percent(limits.get("data_share")),
        "a step's time: exposed communication": _percent(limits.get("communication_share")),
        "a GPU's time: waiting for its host (while profiled)": _percent(limits.get("host_overhead_share")),
        "slowest rank against the fastest": f"{ratio:.2f} times the time" if ratio else None,
        "not known": str(limits["note"]) if limits.get("note") else None,
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _operators(profile: Any) -> list[Block]:
    if not isinstance(profile, dict) or not profile.get("top"):
        return []
    rows: list[list[str | float | int | None]] = [
        [entry["name"], format_time(entry["seconds"]), f"{entry['share']:.0%}", entry["calls"]]
        for entry in profile["top"]
    ]
    table = Table(["operator", "self time", "share", "calls"], rows)
    where = f"traces of every rank are in `{profile['folder']}/`, for ui.perfetto.dev"
    return [Details(f"The most expensive operators of {profile['steps']} steps", [table, f"Of rank 0; {where}."])]
