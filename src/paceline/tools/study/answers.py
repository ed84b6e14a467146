"""Answers the course's questions as text. Every figure comes from a measured cell."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.tools.study.findings import Findings, Kind, Scaled
from paceline.tools.study.statistics import Estimate, ratio

_LINEAR, _GOOD = 0.95, 0.80
SUSPECT = 1.10  # a higher efficiency has another cause than more ranks
_SAME_ACCURACY = 0.0025
_NAMES = {"ddp": "DDP", "fsdp": "FSDP"}
_WORK = ("forward", "backward")


@dataclass(frozen=True)
class Answer:
    question: str
    text: str


def answer_all(findings: Findings) -> list[Answer]:
    answers = [
        Answer("Which strategy is faster, and by how much?", _faster(findings)),
        Answer("Is scaling linear, and where does it stop?", _linear(findings)),
        Answer("What is the bottleneck, and what to try next?", _bottleneck(findings)),
        Answer("Does accuracy hold?", _accuracy(findings)),
        Answer("Which needs less memory?", _memory(findings)),
    ]
    return [answer for answer in answers if answer.text]


def _name(strategy: str) -> str:
    return _NAMES.get(strategy, strategy)


def _ranks(count: int) -> str:
    return f"{count} rank" + ("s" if count > 1 else "")


def _percent(estimate: Estimate) -> str:
    return estimate.show("{:.0%}")


# --- Which is faster --------------------------------------------------------------------------------------------------


def in_one_sentence(findings: Findings) -> str:
    """A summary in one sentence: the cells with most ranks."""
    parts = []
    pairs = _pairs(findings)
    if pairs:
        parts.append(_compare(*pairs[-1]).rstrip("."))
    rows = [s for s in findings.scaled if s.kind.world_size > 1]
    if rows:
        best = max(rows, key=lambda s: (s.kind.world_size, s.speedup.value))
        size, name = best.kind.world_size, _name(best.kind.strategy)
        efficiency = _percent(best.efficiency).partition(" (")[0]
        parts.append(f"{name} on {_ranks(size)} is {best.speedup.value:.2f} times one rank, {efficiency} of linear")
    return "; ".join(parts) + "." if parts else ""


def _pairs(findings: Findings) -> list[tuple[Kind, Kind]]:
    """The same cell under the first two strategies, by world size."""
    if len(findings.strategies) < 2:
        return []
    first, second = findings.strategies[:2]
    scaling = "weak" if findings.scalings == ["weak"] else "strong"
    pairs = []
    for a in findings.of(first, scaling):
        b = next((k for k in findings.kinds if (k.strategy, k.world_size, k.scaling) == (second, *_place(a))), None)
        if b is not None:
            pairs.append((a, b))
    return pairs


def _faster(findings: Findings) -> str:
    pairs = _pairs(findings)
    if not pairs:
        only = _name(findings.strategies[0])
        return f"Only {only} was measured. `paceline study --strategies ddp,fsdp` compares two."
    # Report the first and last size, and each size where the faster strategy changes.
    leaders = [a.images_per_s.value >= b.images_per_s.value for a, b in pairs]
    shown = [n for n in range(len(pairs)) if n in (0, len(pairs) - 1) or leaders[n] != leaders[n - 1]]
    text = " ".join(_compare(*pairs[n]) for n in shown)
    return text if len(shown) == len(pairs) else f"{text} The same one is faster in between."


def _place(kind: Kind) -> tuple[int, str]:
    return kind.world_size, kind.scaling


def _compare(a: Kind, b: Kind) -> str:
    speeds = ratio([cell.images_per_s for cell in a.cells], [cell.images_per_s for cell in b.cells])
    fast, slow = (a, b) if speeds.value >= 1 else (b, a)
    if fast is b:
        speeds = ratio([cell.images_per_s for cell in b.cells], [cell.images_per_s for cell in a.cells])
    where = f"On {_ranks(a.world_size)}"
    if speeds.is_too_noisy or (speeds.low is not None and speeds.low <= 1):
        return f"{where} there is no significant difference ({_name(fast.strategy)} {_times(speeds)})."
    claim = f"{where} **{_name(fast.strategy)} is {_times(speeds)} as fast** as {_name(slow.strategy)}"
    figures = f"{fast.images_per_s.value:,.0f} against {slow.images_per_s.value:,.0f} images/s"
    doubt = "" if speeds.low is not None else "; one run each, so the factor is uncertain"
    return f"{claim} ({figures}{doubt})."


def _times(estimate: Estimate) -> str:
    return estimate.show("{:.2f}") + " times"


# --- Is it linear -----------------------------------------------------------------------------------------------------


def _linear(findings: Findings) -> str:
    parts = []
    for scaling in findings.scalings:
        for strategy in findings.strategies:
            rows = [s for s in findings.scaled_of(strategy, scaling) if s.kind.world_size > 1]
            if rows:
                parts.append(_one_curve(findings, strategy, scaling, rows))
    missing = "There is no run on one rank to compare with. Add 1 to `--world-sizes`, or such a run to `study collect`."
    return " ".join(parts) or missing


def _one_curve(findings: Findings, strategy: str, scaling: str, rows: list[Scaled]) -> str:
    last = rows[-1]
    size = last.kind.world_size
    lost = next((s for s in rows if s.efficiency.value < _GOOD), None)
    efficiency = f"{_percent(last.efficiency)} efficiency on {_ranks(size)}"
    speed = f"{last.speedup.value:.2f} times as fast as one"
    prefix = f"{_name(strategy)}" + (", with the batch growing," if scaling == "weak" else "")
    suspects = [s for s in rows if s.efficiency.value > SUSPECT]
    if suspects:
        ranks = ", ".join(str(s.kind.world_size) for s in suspects)
        verdict = (
            f"{prefix} seems to scale **better than linearly on {ranks} ranks, which is suspect**: {efficiency}, "
            f"{speed}. Likely causes: one rank ran with other threads, on a slower or shared node, or with data that "
            f"do not fit into its cache. Compare `threads`, `host` and `device` in the results.json of these cells."
        )
    elif all(s.efficiency.value >= _LINEAR for s in rows):
        verdict = f"{prefix} **scales linearly** up to the largest measured size: {efficiency}, {speed}."
    elif lost is None:
        verdict = f"{prefix} scales **well but not linearly**: {efficiency}, {speed}."
    else:
        verdict = (
            f"{prefix} **stops scaling well at {_ranks(lost.kind.world_size)}**, where efficiency is "
            f"{_percent(lost.efficiency)}"
        )
        verdict += "." if lost is last else f"; {efficiency}, {speed}."
    law = findings.amdahl if scaling == "strong" else findings.gustafson
    fraction = law.get(strategy)
    if last.speedup.value < 1:
        verdict += " More ranks make it slower here."
    elif fraction is not None and fraction > 0:
        name = "Amdahl" if scaling == "strong" else "Gustafson"
        limit = f", which would cap any speed-up at {1 / fraction:.1f}" if scaling == "strong" else ""
        verdict += f" By {name}'s law {fraction:.1%} of the work does not scale{limit}."
    return verdict


# --- Bottleneck -------------------------------------------------------------------------------------------------------


def _bottleneck(findings: Findings) -> str:
    parts = [text for strategy in findings.strategies if (text := _bottleneck_of(findings, strategy))]
    return " ".join(parts) or "Only whole epochs were timed, so the parts of a step are not known."


def _bottleneck_of(findings: Findings, strategy: str) -> str:
    kinds = [kind for kind in findings.of(strategy, findings.scalings[0]) if kind.phases_s]
    if not kinds:
        return ""
    last = kinds[-1]
    losses = _lost_time(kinds[0] if kinds[0].world_size == 1 else None, last)
    if not losses:
        return f"On {_ranks(last.world_size)} {_name(strategy)} spends its step on {_largest(last)}."
    cause, seconds = max(losses.items(), key=lambda item: item[1])
    share = seconds / last.step_s.value
    if share < 0.03:
        return f"{_name(strategy)} on {_ranks(last.world_size)} has **no significant bottleneck**: {_largest(last)}."
    text = f"{_name(strategy)} on {_ranks(last.world_size)} loses most to **{cause}**: {share:.0%} of the step"
    return f"{text} ({1000 * seconds:.1f} of {1000 * last.step_s.value:.1f} ms). {_REMEDIES[cause]}"


_REMEDIES = {
    "waiting for other ranks": "Try more samples per rank (`--global-batch-size`, `--accumulate`), a faster link "
    "between ranks, or fewer ranks; `paceline bench` measures the link.",
    "ranks slowing each other down": "Each rank computes slower than one alone: they share cores, caches or memory "
    "bandwidth. Try fewer ranks per machine, or pin them. One GPU per rank avoids this.",
    "waiting for data": "Try `--num-workers`, lighter augmentation, or data that fits into memory.",
    "work that does not shrink": "Some costs of a step do not depend on its batch (launches, the update, bookkeeping). "
    "Their part grows as a rank's share gets smaller. Try more samples per rank, or `--compile always`.",
}


def _lost_time(alone: Kind | None, last: Kind) -> dict[str, float]:
    """Seconds of the step that an ideal rank would not need, by cause, computed from the phases."""
    phases = {name: value or 0.0 for name, value in last.phases_s.items()}
    losses = {"waiting for other ranks": phases["communication"], "waiting for data": phases["data"]}
    if alone is not None and alone is not last:
        before = {name: value or 0.0 for name, value in alone.phases_s.items()}
        per_sample = sum(before[name] for name in _WORK) / alone.cells[0].samples_per_rank
        ideal = per_sample * last.cells[0].samples_per_rank
        losses["ranks slowing each other down"] = sum(phases[name] for name in _WORK) - ideal
        losses["waiting for data"] -= before["data"] * last.cells[0].samples_per_rank / alone.cells[0].samples_per_rank
        losses["work that does not shrink"] = phases["update"] + phases["other"]
    return {cause: seconds for cause, seconds in losses.items() if seconds > 0}


def _largest(kind: Kind) -> str:
    phases = {name: value for name, value in kind.phases_s.items() if value}
    name, seconds = max(phases.items(), key=lambda item: item[1])
    return f"{name}, {seconds / kind.step_s.value:.0%} of it"


# --- Accuracy and memory ----------------------------------------------------------------------------------------------


def _accuracy(findings: Findings) -> str:
    parts = []
    for strategy in findings.strategies:
        kinds = findings.of(strategy, findings.scalings[0])
        known = [(kind, accuracy) for kind in kinds if (accuracy := kind.accuracy) is not None]
        if len(known) < 2:
            continue
        (first, base), rest = known[0], known[1:]
        worst, lowest = min(rest, key=lambda pair: pair[1].value)
        change = lowest.value - base.value
        spread = max(_half(estimate) for _, estimate in known)
        where = f"{lowest.value:.2%} on {_ranks(worst.world_size)} against {base.value:.2%} on "
        where += _ranks(first.world_size)
        less = f"{-100 * change:.1f} points less"
        if change >= -max(spread, _SAME_ACCURACY):
            parts.append(f"**Yes, for {_name(strategy)}**: at its lowest {where}, within the spread of the repeats.")
        elif not spread:
            parts.append(f"**Unknown from one run each, for {_name(strategy)}**: {where}, {less}. Use `--repeats 3`.")
        else:
            parts.append(f"**Not quite, for {_name(strategy)}**: {where}, {less}.")
    if not parts:
        return ""
    if findings.scalings == ["strong"]:
        parts.append("The global batch and the samples of every step are the same on any number of ranks.")
    return " ".join(parts)


def _half(estimate: Estimate) -> float:
    return (estimate.high - estimate.low) / 2 if estimate.low is not None and estimate.high is not None else 0.0


def _memory(findings: Findings) -> str:
    first, *others = findings.strategies
    parts = []
    for second in others:
        a = findings.of(first, findings.scalings[0])[-1]
        b = next((k for k in findings.kinds if (k.strategy, k.world_size, k.scaling) == (second, *_place(a))), None)
        if b is not None:
            parts.append(_less_memory(a, b))
    if not any(parts):
        kind = findings.kinds[-1]
        return f"The peak of a rank of {kind.label} was {kind.peak_mb:,.0f} MB." if kind.peak_mb else ""
    if findings.kinds[0].cells[0].device == "cpu":
        parts.append(
            "On CPUs this is the whole process with interpreter, libraries and data, so differences are small."
        )
    return " ".join(parts)


def _less_memory(a: Kind, b: Kind) -> str:
    if not a.peak_mb or not b.peak_mb:
        return ""
    low, high = sorted((a.peak_mb, b.peak_mb))
    less = 1 - low / high
    winner = a if a.peak_mb == low else b
    claim = f"{_name(winner.strategy)} needs **{less:.0%} less** per rank" if less > 0.02 else "Both need the same"
    return f"On {_ranks(a.world_size)}: {claim} ({low:,.0f} against {high:,.0f} MB at the peak)."
