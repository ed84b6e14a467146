"""JSON files of a run folder, with the types that their readers expect.

The files may come from another machine, another version or another person. `settings/small_files.py` limits size,
depth and numbers. `fit` keeps the members that have the expected type and drops the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.settings.small_files import LARGEST_JSON_BYTES, parse_json, read_small

LARGEST_LINES_BYTES = 1 << 30  # enough for months of metrics; only complete lines are parsed


@dataclass(frozen=True)
class Fields:
    """An object: members it must have, members it may have, and what all others must be (None: anything)."""

    required: dict[str, Any] = field(default_factory=dict)
    optional: dict[str, Any] = field(default_factory=dict)
    others: Any = None


Shape = Fields | tuple[Fields, ...] | None


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind. An item that does not fit is dropped, or makes the list invalid."""

    items: Any
    drops: bool = False


@dataclass(frozen=True)
class MapOf:
    """An object with any names and values of one kind."""

    values: Any


@dataclass(frozen=True)
class Number:
    """A finite number within bounds."""

    low: float = -1e300
    high: float = 1e300
    is_whole: bool = False


@dataclass(frozen=True)
class Word:
    """One of a few texts."""

    allowed: tuple[str, ...]


COUNT = Number(0, 2**53, is_whole=True)  # the largest integer that JavaScript keeps exactly
SHARE = Number(0, 1)
MAYBE = type(None)  # for pairs such as (COUNT, MAYBE)


def read_bounded(path: Path, at_most_bytes: int = LARGEST_JSON_BYTES) -> bytes:
    """Read a file of a run folder. Raises OSError or ValueError if it is not a regular file, or too large."""
    return read_small(path, at_most_bytes, follows_links=False)


def read_object(path: Path, shape: Shape = None) -> dict[str, Any]:
    """The object in a small file of a run; empty if the file is missing or invalid."""
    try:
        content = parse_json(read_bounded(path))
        return fit(content, shape or _ANYTHING)  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def read_objects(path: Path, shape: Shape = None) -> list[dict[str, Any]]:
    """The objects of a file with one object per line. A line that a crash has cut off is left out."""
    try:
        content = read_bounded(path, LARGEST_LINES_BYTES)
    except (OSError, ValueError):
        return []
    return list(parse_lines(content, shape))


def parse_lines(content: bytes, shape: Shape = None) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        try:
            yield fit(parse_json(line), shape or _ANYTHING)
        except ValueError:
            continue


def fit(value: Any, shape: Any) -> Any:
    """The value without members that do not fit. Raises ValueError if the value itself does not fit.

    A shape is a type, a tuple of alternative shapes, Number, Word, Fields, ListOf or MapOf. float accepts whole numbers
    and NaN, too. Only bool accepts True. None accepts anything.
    """
    if shape is None:
        return value
    if isinstance(shape, Fields):
        return _fit_object(value, shape)
    if isinstance(shape, ListOf):
        return list(_fit_items(_of_type(value, list), shape))
    if isinstance(shape, MapOf):
        return {name: fit(item, shape.values) for name, item in _of_type(value, dict).items()}
    if isinstance(shape, tuple):
        return _fit_one_of(value, shape)
    if isinstance(shape, Number):
        return _fit_number(value, shape)
    if isinstance(shape, Word):
        return _fit_word(value, shape)
    return _of_type(value, shape)


def _fit_object(value: Any, shape: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    missing = shape.required.keys() - _of_type(value, dict).keys()
    if missing:
        raise ValueError(f"{min(missing)} is missing")
    for name, item in value.items():
        wanted = shape.required.get(name, shape.optional.get(name, shape.others))
        try:
            found[name] = fit(item, wanted)
        except ValueError:
            if name in shape.required:
                raise
    return found


def _fit_items(items: list[Any], shape: ListOf) -> Iterator[Any]:
    for item in items:
        try:
            yield fit(item, shape.items)
        except ValueError:
            if not shape.drops:
                raise


def _fit_number(value: Any, shape: Number) -> float:
    kinds = (int,) if shape.is_whole else (int, float)
    if type(value) not in kinds or not shape.low <= value <= shape.high:  # a NaN is within no bounds
        raise ValueError("not a number within its bounds")
    return value  # type: ignore[no-any-return]


def _fit_word(value: Any, shape: Word) -> str:
    if not isinstance(value, str) or value not in shape.allowed:
        raise ValueError(f"not one of {', '.join(shape.allowed)}")
    return value


def _fit_one_of(value: Any, shapes: tuple[Any, ...]) -> Any:
    for shape in shapes:
        try:
            return fit(value, shape)
        except ValueError:
            continue
    raise ValueError("it is of another type")


def _of_type(value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return value
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


_ANYTHING = Fields()


_SECONDS = Number(0, 1e12)
_TIME = Number(0, 1e11)  # seconds since 1970, within the years a date can have
_SIZE = Number(0, 1e18)

STATUS = Fields(
    optional={
        **dict.fromkeys(("status", "reason", "host", "updated", "mirror"), str),
        **dict.fromkeys(("step", "last_step", "pid"), COUNT),
        **dict.fromkeys(("eta_s", "save_s"), _SECONDS),
        "test_accuracy": SHARE,
        "test_metric": str,
        "test_value": float,
    }
)

MIRROR = Fields(
    required={"url": str},
    optional={"token": str, "keep_last": COUNT, "keep_best": COUNT, "says": str},
)

# Strings: these become arguments of the scheduler's commands.
_JOB = {"job_id": str, "cluster": str, "script": str, "command": ListOf(str)}
JOB_RECORD = Fields(
    required=_JOB,
    optional={
        **dict.fromkeys(("array", "scheduler", "namespace", "api", "submitted", "cancelled"), str),
        **dict.fromkeys(("outcome", "outcome_reason", "outcome_code"), str),
        "earlier": ListOf(str),
    },
)
JOB_IDS = Fields(optional={**_JOB, "earlier": ListOf(str)})  # enough to find a run by its job

# metrics.jsonl. A loss may be NaN; the user's own metrics are numbers, too.
_STEP_ROW = Fields(
    required={"kind": Word(("step",)), "step": COUNT, "loss": float},
    optional={"time": _TIME},
    others=(float, MAYBE),
)
_EPOCH_ROW = Fields(
    required={
        **{"kind": Word(("epoch",)), "step": COUNT, "epoch": COUNT, "phase": Word(("train", "val", "test"))},
        **dict.fromkeys(("loss", "throughput"), float),
    },
    optional={"accuracy": float, "time": _TIME, "ranks": MapOf(ListOf(float))},
    others=(float, MAYBE),
)
ROW = (_STEP_ROW, _EPOCH_ROW)

FAILURE = Fields(
    optional={
        **dict.fromkeys(("attempt", "attempts", "rank", "step", "lost_steps"), (COUNT, MAYBE)),
        **dict.fromkeys(("what", "done", "time", "traceback"), (str, MAYBE)),
    }
)
FAULT = Fields(optional={"what": str, "rank": COUNT, "attempt": COUNT})

EXAMPLES = Fields(
    optional={
        "examples": ListOf(
            Fields(required={"picture": str}, optional={"true": str, "predicted": str, "confidence": SHARE}), drops=True
        )
    }
)

ENVIRONMENT = Fields(
    optional={
        **dict.fromkeys(("recipe", "job", "resumed_from", "paceline", "python", "platform", "folder"), str),
        "packages": MapOf(str),
        "command": ListOf(str),
        "git": (Fields(optional={"commit": str, "dirty": bool}), MAYBE),
    }
)

_PROCESS = Fields(
    optional={
        **dict.fromkeys(("host", "device"), str),
        **dict.fromkeys(("rank", "samples", "steps"), COUNT),
        **dict.fromkeys(("seconds", "seconds_to_last_step", "data_wait_seconds"), (_SECONDS, MAYBE)),
        **dict.fromkeys(("samples_per_second", "energy_joules"), (_SIZE, MAYBE)),
        "peak_memory_mb": _SIZE,
        "step_ms": Fields(optional=dict.fromkeys(("mean", "p50", "p95"), _SECONDS)),
        "breakdown_ms": MapOf((_SECONDS, MAYBE)),
    }
)
_OPERATOR = Fields(required={"name": str, "seconds": _SECONDS, "share": Number(0, 1e6), "calls": COUNT})
_LIMITS = Fields(
    required={"steps": COUNT},
    optional={
        **dict.fromkeys(("mfu", "data_share", "communication_share", "host_overhead_share"), (Number(0, 1e6), MAYBE)),
        **dict.fromkeys(("flops_per_sample", "flops_per_s", "ceiling_flops_per_s"), (Number(0, 1e30), MAYBE)),
        "slowest_to_fastest": (Number(0, 1e9), MAYBE),
        "precision": str,
        "note": (str, MAYBE),
        "verdict": (Fields(required={"kind": str, "text": str, "try": str}), MAYBE),
    },
)
RESULTS = Fields(
    optional={
        **dict.fromkeys(("status", "task", "best_by", "strategy", "weights_sha256", "optimizer_sha256"), str),
        **dict.fromkeys(("test_accuracy", "best_validation_accuracy"), (SHARE, MAYBE)),
        **dict.fromkeys(("best_epoch", "steps", "samples_seen", "world_size"), (COUNT, MAYBE)),
        **dict.fromkeys(("test_loss", "best_value"), (float, MAYBE)),
        "test_metrics": MapOf((float, MAYBE)),
        "samples_per_second": (_SIZE, MAYBE),
        "training_seconds": (_SECONDS, MAYBE),
        "speed_note": str,
        "distributed_training": Fields(
            optional={
                **dict.fromkeys(("backend", "gradients", "precision"), str),
                **dict.fromkeys(("world_size", "global_batch_size", "rank_batch_size", "epochs"), COUNT),
                **dict.fromkeys(("is_compiled", "is_recorded"), bool),
                "learning_rate": Number(0),
                "communicated_bytes_per_step": _SIZE,
            }
        ),
        "process_metrics": ListOf(_PROCESS),
        "model_info": Fields(optional={"parameters": COUNT}),
        "limits": (_LIMITS, MAYBE),
        "profile": (Fields(required={"top": ListOf(_OPERATOR), "folder": str, "steps": COUNT}), MAYBE),
        "test": Fields(
            optional={
                "samples": COUNT,
                **dict.fromkeys(
                    ("class_accuracy", "class_precision", "class_f1", "class_average_precision"), MapOf((SHARE, MAYBE))
                ),
                "class_mae": MapOf((Number(0), MAYBE)),
                "confusion_matrix": ListOf(ListOf(COUNT)),
            }
        ),
    }
)
