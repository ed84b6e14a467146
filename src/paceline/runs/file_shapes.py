"""The fields that readers expect in the JSON files of a run folder. See `json_files.fit`."""

from __future__ import annotations

from paceline.runs.json_files import COUNT, MAYBE, SHARE, Fields, ListOf, MapOf, Number, Word

_SECONDS = Number(0, 1e12)
_TIME = Number(0, 1e11)  # seconds since 1970, within the years a date can have
_SIZE = Number(0, 1e18)

STATUS = Fields(
    optional={
        **dict.fromkeys(("status", "reason", "host", "updated", "mirror"), str),
        **dict.fromkeys(("step", "last_step", "pid"), COUNT),
        **dict.fromkeys(("eta_s", "save_s"), _SECONDS),
        "test_accuracy": SHARE,
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
        **dict.fromkeys(("seconds", "seconds_to_last_step", "data_wait_seconds"), _SECONDS),
        **dict.fromkeys(("samples_per_second", "peak_memory_mb"), _SIZE),
        "energy_joules": (_SIZE, MAYBE),
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
        "samples_per_second": _SIZE,
        "training_seconds": _SECONDS,
        "distributed_training": Fields(
            optional={
                **dict.fromkeys(("backend", "gradients", "precision"), str),
                **dict.fromkeys(("world_size", "global_batch_size", "rank_batch_size", "epochs"), COUNT),
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
