"""One line: what limits a run, and what to try next. Pure functions of the ranks' phase times.

All ranks end a step together, so a slow rank shows as waiting time of the others, not as a longer step. So a rank's own
work and its waiting time are separated first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.metrics.compile_gain import Gain, KnownTimes, expected_gain
from paceline.metrics.phases import WARMUP_STEPS
from paceline.metrics.screen import format_flops
from paceline.runtime.detect import World
from paceline.settings.schema import SHARDED, Config

LEAST_STEPS = WARMUP_STEPS + 1  # shorter runs have only warm-up steps, which are too slow
MUCH = 0.2  # share of a step that is worth reporting
_SLOW = 0.1  # the same for a slow rank; lower, because all other ranks wait for it
_SHORT_STEP_MS = 50.0  # below this, the launch overhead of hundreds of operators (about 10 us each) matters
_CROWDED = 1.5  # load per core; above this, other programs compete for the cores
DENSE = 0.3  # share of the matrix ceiling that convolutions with normalisation reach on a busy device


@dataclass(frozen=True)
class RankTime:
    """Milliseconds of a rank's step."""

    rank: int
    host: str
    step_ms: float
    data_ms: float
    communication_ms: float | None  # waiting for other ranks; None if not measured

    @property
    def own_ms(self) -> float:
        return self.step_ms - (self.communication_ms or 0.0)


@dataclass(frozen=True)
class SlowRank:
    """The slowest rank, compared with the median of the others."""

    rank: int
    host: str
    times_slower: float  # 1.5: takes 50 % longer
    lost_share: float  # of a step, for the other ranks
    is_data: bool  # most of the loss is data loading


@dataclass(frozen=True)
class Shares:
    """Shares of a step's time, averaged over ranks."""

    data: float
    communication: float | None  # not hidden by computing: exchange, and waiting for slower ranks
    exchange: float | None  # without waiting for slower ranks: the minimum over ranks
    slowest: SlowRank | None
    slowest_to_fastest: float | None

    @property
    def computing(self) -> float:
        return max(0.0, 1.0 - self.data - (self.communication or 0.0))


@dataclass(frozen=True)
class Speed:
    """FLOP/s of all ranks together during their steps."""

    flops_per_s: float | None = None
    ceiling_flops_per_s: float | None = None
    note: str = ""  # why a value is unknown

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation: the share of the ceiling that the steps reach."""
        if self.flops_per_s is None or not self.ceiling_flops_per_s:
            return None
        return self.flops_per_s / self.ceiling_flops_per_s


@dataclass(frozen=True)
class Conditions:
    """The configuration and machine for which advice is given."""

    config: Config
    world: World
    strategy: str
    precision: str
    cores: int  # per node
    load: float = 0.0  # load average of the last minute, including this run
    step_ms: float = 0.0
    is_packed: bool = False  # the data is a folder of pictures that is packed as pixels
    host_overhead_share: float | None = None  # share of time in which the GPU waited for the host
    is_compiled: bool = False
    is_recorded: bool = False  # steps are replayed as CUDA graphs
    compile_gain: Gain | None = None  # None: not known

    @property
    def is_cuda(self) -> bool:
        return self.world.device.startswith("cuda")


@dataclass(frozen=True)
class UnusedOption:
    """A setting that would make steps shorter, and is not on."""

    name: str  # compile, recording, precision
    tip: str
    gain_share: float | None = None  # of a step's time; None: not known
    pays_from_s: float | None = None  # seconds of training from which it pays; None: at once


@dataclass(frozen=True)
class RunVerdict:
    kind: str  # input-bound, communication-bound, straggler, compute-bound or overhead
    text: str
    tip: str
    unused: tuple[UnusedOption, ...] = ()  # on a GPU, by expected gain

    @property
    def line(self) -> str:
        return f"{self.text}; next: {self.tip}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "text": self.text,
            "try": self.tip,
            "unused": [asdict(option) for option in self.unused],
        }


def split_time(ranks: Sequence[RankTime]) -> Shares:
    data = statistics.fmean(rank.data_ms / rank.step_ms for rank in ranks)
    waits = [rank.communication_ms / rank.step_ms for rank in ranks if rank.communication_ms is not None]
    if len(ranks) == 1:
        return Shares(data, 0.0, 0.0, None, None)
    if len(waits) < len(ranks):
        return Shares(data, None, None, None, None)
    by_own = sorted(ranks, key=lambda rank: rank.own_ms)
    slowest, others = by_own[-1], by_own[:-1]
    usual_ms = statistics.median(rank.own_ms for rank in others)
    usual_data_ms = statistics.median(rank.data_ms for rank in others)
    lost_ms = slowest.own_ms - usual_ms
    slow = SlowRank(
        rank=slowest.rank,
        host=slowest.host,
        times_slower=slowest.own_ms / max(usual_ms, 1e-9),
        lost_share=lost_ms / slowest.step_ms,
        is_data=slowest.data_ms - usual_data_ms > lost_ms / 2,
    )
    return Shares(data, statistics.fmean(waits), min(waits), slow, slowest.own_ms / max(by_own[0].own_ms, 1e-9))


def judge_run(shares: Shares, speed: Speed, conditions: Conditions) -> RunVerdict:
    """Report the largest loss above its threshold. Without one, the run is compute-bound or has overhead."""
    losses = {"input-bound": shares.data / MUCH, "communication-bound": (shares.exchange or 0.0) / MUCH}
    if shares.slowest is not None:
        losses["straggler"] = shares.slowest.lost_share / _SLOW
    kind = max(losses, key=lambda name: losses[name])
    if losses[kind] < 1.0:
        is_dense = speed.mfu is None or speed.mfu / max(shares.computing, 1e-9) >= DENSE
        kind = "compute-bound" if is_dense else "overhead"
    text, tips = {
        "input-bound": _judge_input,
        "communication-bound": _judge_communication,
        "straggler": _judge_straggler,
        "compute-bound": _judge_compute,
        "overhead": _judge_overhead,
    }[kind](shares, speed, conditions)
    return RunVerdict(kind, f"{kind}: {text}", ", or ".join(tips[:2]), tuple(unused_options(conditions)))


Judgement = tuple[str, list[str]]  # the finding, and tips in order of expected gain


def _judge_input(shares: Shares, speed: Speed, conditions: Conditions) -> Judgement:
    text = f"{shares.data:.0%} of a step waits for its batch{_at_ceiling(speed, ', ')}"
    return text, faster_data(conditions)


def _judge_communication(shares: Shares, speed: Speed, conditions: Conditions) -> Judgement:
    text = f"{shares.exchange or 0.0:.0%} of a step is exchange that computing does not hide"
    return f"{text}, data wait {shares.data:.0%}", less_exchange(conditions)


def _judge_straggler(shares: Shares, speed: Speed, conditions: Conditions) -> Judgement:
    slow = shares.slowest
    assert slow is not None
    text = f"rank {slow.rank} on {slow.host} takes {slow.times_slower:.1f} times the others' time for its own work"
    if slow.is_data:
        text += ", most of it for its data"
        tip = f"look at how {slow.host} reads its data (disk, network, other programs)"
    else:
        tip = f"look at {slow.host}: other programs, heat, a slower device (paceline doctor)"
    return f"{text}, and they wait {slow.lost_share:.0%} of each step", [tip]


def _judge_compute(shares: Shares, speed: Speed, conditions: Conditions) -> Judgement:
    reached = _at_ceiling(speed) or f"{shares.computing:.0%} of a step is computing"
    unknown = f" ({speed.note})" if speed.mfu is None and speed.note else ""
    return f"{reached}{unknown}, {_rest(shares)}", faster_arithmetic(conditions)


def _judge_overhead(shares: Shares, speed: Speed, conditions: Conditions) -> Judgement:
    text = f"{_at_ceiling(speed)} though {_rest(shares)}: much of a step is not matrix arithmetic"
    idle = conditions.host_overhead_share
    if idle is not None and idle >= MUCH:
        text += f", and the GPU waits {idle:.0%} of it for its host"
    return text, less_overhead(conditions)


def _at_ceiling(speed: Speed, before: str = "") -> str:
    if speed.mfu is None:
        return ""
    reached, ceiling = format_flops(speed.flops_per_s or 0.0), format_flops(speed.ceiling_flops_per_s or 0.0)
    number, _, unit = ceiling.partition(" ")
    of = number if reached.endswith(unit) else ceiling
    return f"{before}{speed.mfu:.0%} of the matrix ceiling ({reached} of {of})"


def _rest(shares: Shares) -> str:
    parts = [f"data wait {shares.data:.0%}"]
    if shares.communication is None:
        parts.append("exchange not measured separately")
    elif shares.slowest is not None:
        parts.append(f"exchange {shares.communication:.0%}")
    return ", ".join(parts)


# --- Tips in order of expected gain, without settings that are already active


def faster_data(conditions: Conditions) -> list[str]:
    data = conditions.config.data
    if data.dataset == "folder" and not conditions.is_packed:
        tips = ["pack the pictures once (paceline data pack)"]
        cores = conditions.cores // conditions.world.local_world_size
        return [f"more --num-workers than {data.num_workers}", *tips] if data.num_workers < cores else tips
    tips = ["a faster disk, or enough memory for the packed pictures"] if conditions.is_packed else []
    if data.augment == "imagenet":
        tips += ["--augment light", f"a smaller --image-size than {data.image_size}"]
    elif data.augment != "none":
        tips.append("--augment none")
    if data.cutout:
        tips.append("no --cutout")
    if not (conditions.is_cuda or conditions.is_packed):
        tips.append("a GPU, which would hold this data set in its own memory")
    return tips or ["--profile, to see what the pipeline does"]


def less_exchange(conditions: Conditions) -> list[str]:
    tips = []
    if conditions.strategy in SHARDED:
        tips.append("--strategy ddp if the model fits (sharded weights are exchanged too)")
    if conditions.config.parallel.sync_bn:
        tips.append("no --sync-bn")
    tips.append("a larger --global-batch-size (gradients are exchanged once per step)")
    if not conditions.is_cuda and conditions.world.local_world_size > 1:
        tips.append("fewer --processes with more threads each")
    return tips


def faster_arithmetic(conditions: Conditions, *, is_dense: bool = True) -> list[str]:
    world = conditions.world
    if not conditions.is_cuda:
        if _is_crowded(conditions):
            return [_quiet_machine(conditions)]
        used = world.local_world_size * world.threads
        if used < conditions.cores:
            return [f"the other cores too: {used} of {conditions.cores} are used (--processes, --omp-num-threads)"]
        return ["more cores or a GPU; faster links or disks would not help"]
    tips = [option.tip for option in unused_options(conditions)]
    if not is_dense:
        tips.append("a larger --global-batch-size")
    return tips or ["more or faster GPUs: this one is nearly fully used"]


def unused_options(conditions: Conditions) -> list[UnusedOption]:
    """What would make the steps of a GPU shorter without other results than rounding. In order of expected gain."""
    if not conditions.is_cuda:
        return []
    found, train = [], conditions.config.train
    if conditions.precision.startswith("float32"):
        found.append(UnusedOption("precision", "mixed precision (leave out --no-amp)"))
    if not conditions.is_compiled and not (conditions.config.parallel.exact or train.deterministic):
        found += _unused_compilation(conditions)
    if train.compile == "never" and not conditions.is_recorded and conditions.world.world_size == 1:
        found.append(UnusedOption("recording", "no --compile never, which also switches CUDA graphs off"))
    return found


def _unused_compilation(conditions: Conditions) -> list[UnusedOption]:
    """`--compile auto` does not compile a short run. A longer one of the same kind would gain."""
    gain = conditions.compile_gain or expected_gain(KnownTimes(), is_cached=False)
    if gain.share <= 0:
        return []  # measured: compiled steps of this model are no shorter
    flag = "no --compile never" if conditions.config.train.compile == "never" else "--compile always"
    how = "measured" if gain.is_measured else "expected"
    tip = (
        f"{flag}: {gain.share:.0%} of a step less ({how}), which pays from about {gain.pays_from_s:,.0f} s of training"
    )
    return [UnusedOption("compile", tip, gain.share, gain.pays_from_s)]


def less_overhead(conditions: Conditions) -> list[str]:
    train, parallel, world = conditions.config.train, conditions.config.parallel, conditions.world
    tips = []
    if not conditions.is_cuda and _is_crowded(conditions):
        tips.append(_quiet_machine(conditions))
    if parallel.exact and (parallel.lanes or world.world_size) > world.world_size:
        tips.append("fewer --lanes (each runs by itself)")
    if train.accumulate > 1:
        tips.append(f"a smaller --accumulate than {train.accumulate} (larger microbatches)")
    if train.deterministic and conditions.is_cuda:
        tips.append("no --deterministic")
    tips += [option.tip for option in unused_options(conditions) if option.name != "precision"]
    if conditions.step_ms < _SHORT_STEP_MS:
        tips.append("a larger --global-batch-size (small operators are dominated by launch overhead)")
    is_profiled = conditions.config.run.profile
    tips.append("profile/top.txt, which names the operators" if is_profiled else "--profile, to see which operators")
    return tips


def _is_crowded(conditions: Conditions) -> bool:
    return conditions.load > _CROWDED * conditions.cores


def _quiet_machine(conditions: Conditions) -> str:
    return f"fewer other programs on this machine (load {conditions.load:.1f} on {conditions.cores} cores)"
