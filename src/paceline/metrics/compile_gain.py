"""What compiling gains: learned from earlier runs of the same work, and the decisions that follow. Pure functions.

Work is a model, its input shapes, its microbatch, a precision, a GPU and a version of torch. Each run on a GPU writes
the time of its steps into one small file per work. When compiled and plain steps are known, their ratio is used
instead of an assumption.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from paceline.runs.folder import write_json
from paceline.settings.small_files import read_json_object

# Of a step's time. Measured on an H200: 0.29 to 0.33 for ResNet-50, ViT-B/16 and ConvNeXt-T (batch 256 at 224), 0.21 to
# 0.25 for ResNet-18, VGG-19 and smaller nets.
ASSUMED_SHARE = 0.25
COMPILE_S, CACHED_COMPILE_S = 20.0, 3.0  # the first time, and with compiled code in the cache


@dataclass(frozen=True)
class KnownTimes:
    """Seconds that earlier runs of the same work measured; None: not measured yet."""

    plain_step_s: float | None = None
    compiled_step_s: float | None = None


@dataclass(frozen=True)
class Gain:
    """What compiling is expected to save."""

    share: float  # of a plain step's time; 0 or less: it does not help
    compile_s: float
    is_measured: bool

    def pays(self, steps: int, plain_step_s: float) -> bool:
        """Whether it saves more time in so many steps than it takes."""
        return self.share * steps * plain_step_s > self.compile_s

    @property
    def pays_from_s(self) -> float:
        """Seconds of training with plain steps from which it pays."""
        return self.compile_s / self.share if self.share > 0 else math.inf


def expected_gain(known: KnownTimes, *, is_cached: bool) -> Gain:
    """`is_cached`: this machine has compiled the work before."""
    compile_s = CACHED_COMPILE_S if is_cached else COMPILE_S
    if known.plain_step_s and known.compiled_step_s:
        return Gain(1 - known.compiled_step_s / known.plain_step_s, compile_s, is_measured=True)
    return Gain(ASSUMED_SHARE, compile_s, is_measured=False)


def recall_times(path: Path) -> KnownTimes:
    """What earlier runs have written. A file that is missing or invalid knows nothing."""
    try:
        content = read_json_object(path)
        values = {field.name: content.get(field.name) for field in fields(KnownTimes)}
        is_sound = all(value is None or 0 < float(value) < math.inf for value in values.values())
    except (OSError, RuntimeError, ValueError, TypeError):  # RuntimeError: the user has no home folder
        return KnownTimes()
    return KnownTimes(**values) if is_sound else KnownTimes()


def remember_times(path: Path, **measured: float) -> None:
    """Add what this run measured to what is known. Write errors are ignored: a later run measures again."""
    with suppress(OSError, RuntimeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**asdict(recall_times(path)), **measured})
