"""Whether a run may continue from a checkpoint: which settings may change. No torch, so the check is early."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

from paceline.checkpoints.format import MANIFEST, DamagedCheckpoint, step_folders
from paceline.checkpoints.store import Checkpoint, inspect_checkpoint, pointed_at
from paceline.errors import CheckpointError
from paceline.runs.patience import UnreadableNow
from paceline.settings.recipe_file import RESOLVED
from paceline.settings.schema import field_table
from paceline.settings.syntax import CodeReference
from paceline.settings.values import RENAMED, Setting, as_typed

# If one of these changes, it is another run.
IDENTITY = (
    *("dataset", "num_samples", "input_size", "num_classes", "train_split", "folds", "fold", "augment", "image_size"),
    *("crop_from",),
    *("model_name", "hidden_size", "model_args", "optimizer", "loss", "global_batch_size", "seed", "exact"),
    *("task", "class_weights", "best_by", "sampling", "epoch_samples", "teacher_sha256", "distill"),
    *("keep_share", "keep_random", "keep_by_sha256"),
)
# What checkpoints of releases before these settings were trained with.
BEFORE = {
    "crop_from": "square",
    "loss": "",
    "folds": 0,
    "fold": 0,
    "model_args": [],
    "task": "single-label",
    "class_weights": [],
    "best_by": "",
    "sampling": "uniform",
    "epoch_samples": 0,
    "teacher_sha256": "",
    "distill": "soft",
    "keep_share": 1.0,
    "keep_random": 0.25,
    "keep_by_sha256": "",
}
# These do not change what a run computes.
SILENT = (
    *("output_dir", "resume", "load_policy", "track", "max_steps", "metrics", "processes", "profile", "ranks_per_gpu"),
    *(
        "accept_new_data",
        "start_over_if_damaged",
        "max_restarts",
        "hang_timeout_s",
        "stop_signals",
        "notice_s",
        "auto_microbatch",
        "audit",
        "inject",
    ),
)
_MOST_LINES = 3
_log = logging.getLogger("paceline")


def require_same_run(checkpoint: Checkpoint, now: dict[str, Any], *, lanes: int | None = None) -> list[str]:
    """Refuse a checkpoint of another run; returns the names of settings that differ and may.

    `now` is the flattened config. `lanes`, where they are known, count for an exact run.
    """
    config = checkpoint.state.get("config", {})
    # Checkpoints of earlier releases hold the earlier names of settings.
    saved = {**BEFORE, **{RENAMED.get(name, name): value for name, value in config.items()}}
    saved, now = (json.loads(json.dumps(values)) for values in (saved, now))
    identity: tuple[str, ...] = IDENTITY
    for model, digest in (("teacher", "teacher_sha256"), ("keep_by", "keep_by_sha256")):
        if now.get(model) and not now[digest]:
            now[digest] = saved[digest]  # not computed yet: the ranks compare it
    if now["exact"] and lanes is not None:
        saved_world = int(checkpoint.manifest.about.get("world_size", 0))
        saved["lanes"], now["lanes"] = saved.get("lanes") or saved_world, lanes
        identity = (*IDENTITY, "lanes")
    # A setting that is newer than the checkpoint had no other value then.
    changed = [name for name in now if saved.get(name) != now[name] and (name in saved or name in identity)]
    lines = [f"{name}: saved {saved.get(name)!r}, now {now[name]!r}" for name in changed if name in identity]
    if lines:
        raise CheckpointError(
            "this run cannot continue from that checkpoint",
            where=str(checkpoint.path),
            got="\n".join(lines[:_MOST_LINES]),
            hint=_how_to_continue(checkpoint.path, {name: saved.get(name) for name in changed if name in identity}),
        )
    return [name for name in changed if name not in SILENT]


def _how_to_continue(checkpoint: Path, saved: dict[str, Any]) -> str:
    """The config of the run has all of its settings; a checkpoint without its run needs flags."""
    run = checkpoint.resolve().parent.parent
    flags = [token for name, value in saved.items() if name in field_table() for token in _as_flags(name, value)]
    ways = [f"with its settings: paceline train {shlex.quote(str(run / RESOLVED))} --resume auto"]
    ways = ways if (run / RESOLVED).is_file() else []
    ways += [f"with flags: {shlex.join(flags)}"] if flags else []
    return "\n".join([*ways, f"or a new run from its weights: --init-from {shlex.quote(str(checkpoint))}"])


def _as_flags(name: str, value: Any) -> list[str]:
    return [] if value is None else Setting(field_table()[name], as_typed(value), "flag", "").tokens()


def changed_code(state: dict[str, Any], now: dict[str, str]) -> list[str]:
    """Names of functions whose file had another content when the state was saved. Older states do not have hashes."""
    saved = state.get("code")
    if not isinstance(saved, dict):
        return []
    return [name for name, digest in now.items() if saved.get(name, digest) != digest]


def warn_of_changed_code(checkpoint: Checkpoint, code: dict[CodeReference, str]) -> None:
    """`code`: a hash of each function's source. Not refused: a comment changes it too."""
    names = changed_code(checkpoint.state, {item.name: digest for item, digest in code.items()})
    changed = ", ".join(f"{item.field} {item}" for item in code if item.name in names)
    if changed:
        _log.warning("warning: code has changed since %s was saved: %s", checkpoint.path.name, changed)


def warn_of_other_random_numbers(checkpoint: Checkpoint, now: int) -> None:
    """`now`: the version of the method that draws them. Checkpoints without it are of version 1."""
    if checkpoint.state.get("random_numbers", 1) != now:
        _log.warning(
            "warning: %s is from another version of Paceline, which draws dropout differently;"
            " the run continues with other random numbers",
            checkpoint.path.name,
        )


def refuse_early(source: Path, now: dict[str, Any], *, prefer_best: bool = False) -> None:
    """Refuse a checkpoint of another run before torch is imported and ranks are started.

    A checkpoint that is damaged or cannot be read now is not refused here: the ranks verify it completely, wait for
    the storage, and can use an older one.
    """
    try:
        checkpoint = _look_at(source, prefer_best=prefer_best)
    except (DamagedCheckpoint, UnreadableNow, OSError):
        return
    if checkpoint is not None:
        require_same_run(checkpoint, now)


def _look_at(source: Path, *, prefer_best: bool) -> Checkpoint | None:
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    best = pointed_at(folder, "best") if prefer_best else None
    path = source if (source / MANIFEST).exists() else best or next(iter(step_folders(folder)), None)
    return inspect_checkpoint(path.resolve()) if path is not None else None
