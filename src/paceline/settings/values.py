"""One given value with its origin, and its conversion by the rules of its field. Every source uses this."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from paceline.errors import UserError, printable_line
from paceline.settings.declare import FieldSpec, Range, fields_of
from paceline.settings.text import check_text

T = TypeVar("T")
# file: a recipe. flag: the command line, or a caller that takes its place (Python, Runnable).
Origin = Literal["file", "site", "environment", "flag"]
# Settings that had another name in earlier releases.
RENAMED = {
    "save_frequency": "keep_every_epochs",
    "hang_timeout": "hang_timeout_s",
    "notice": "notice_s",
    "signal_notice": "signal_notice_s",
    "grace": "grace_s",
    "start_timeout": "start_timeout_s",
    "node_timeout": "node_timeout_s",
    "every": "every_s",
    "plant": "inject",
}
# What other trainers call a setting, for the hint of an error.
_ELSEWHERE = {
    "base_lr": ("lr", "learning_rate", "max_lr", "peak_lr"),
    "global_batch_size": ("b", "bs", "batch", "batch_size", "train_batch_size", "total_batch_size"),
    "epochs": ("e", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"),
    "weight_decay": ("wd", "l2"),
    "num_workers": ("j", "num_worker", "dataloader_workers", "num_data_workers"),
    "model_name": ("a", "arch", "model", "net", "network", "backbone"),
    "data_dir": ("data", "data_path", "data_root", "root", "dataset_dir", "train_dir"),
    "output_dir": ("o", "output", "out", "out_dir", "save_dir", "log_dir", "run_dir", "name"),
    "processes": ("gpus", "num_gpus", "n_gpus", "ngpus", "devices", "nproc_per_node", "num_processes", "nprocs"),
    "accumulate": ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps", "accum_iter"),
    "optimizer": ("opt", "optim"),
    "schedule": ("sched", "scheduler", "lr_scheduler", "lr_schedule", "lr_scheduler_type"),
    "warmup_epochs": ("warmup", "warmup_steps", "warmup_ratio", "lr_warmup_epochs"),
    "image_size": ("img_size", "imgsz", "input_res", "resolution", "size"),
    "weights": ("pretrained", "init_weights"),
    "resume": ("ckpt", "checkpoint", "ckpt_path", "resume_from", "resume_from_checkpoint"),
    "clip_norm": ("clip_grad", "clip_grad_norm", "max_grad_norm", "gradient_clip_val", "grad_clip"),
    "label_smoothing": ("smoothing",),
    "mixup_alpha": ("mixup",),
    "cutmix_alpha": ("cutmix",),
    "erase": ("reprob", "random_erase"),
    "ema_decay": ("ema", "model_ema", "model_ema_decay"),
    "amp_dtype": ("precision", "mixed_precision", "fp16", "bf16"),
    "stop_early": ("patience", "early_stopping", "early_stop", "early_stopping_patience"),
    "freeze": ("freeze_layers", "freeze_backbone"),
    "layer_decay": ("llrd", "layer_lr_decay"),
    "teacher": ("distill_teacher", "teacher_model"),
    "seed": ("random_seed", "manual_seed"),
    "log_frequency": ("print_freq", "log_every", "log_interval", "logging_steps", "log_every_n_steps"),
    "strategy": ("ddp", "fsdp", "hsdp", "distributed", "dist", "parallel"),
    "train_split": ("val_split", "validation_split", "val_size"),
    "test_batch_size": ("eval_batch_size", "val_batch_size"),
}
_NAMES_ELSEWHERE = {other: name for name, others in _ELSEWHERE.items() for other in others}
STORAGE_PATIENCE = "PACELINE_STORAGE_PATIENCE_S"
STORE_TIMEOUT = "PACELINE_STORE_TIMEOUT_S"
START_TIMEOUT = "PACELINE_START_TIMEOUT_S"
MAX_REQUEUES = "PACELINE_MAX_REQUEUES"
_FROM_ZERO = Range(low=0)
_WHOLE = Range(low=0, high=10**9)


@dataclass(frozen=True)
class Setting:
    """One given value, and its origin."""

    field: FieldSpec
    values: tuple[str, ...]
    kind: Origin
    where: str

    def tokens(self) -> list[str]:
        """As command-line arguments."""
        field = self.field
        if field.is_bool:
            return [field.flag if self.values == ("true",) else field.flag.replace("--", "--no-", 1)]
        is_list = field.is_tuple and field.arg.many == "spaces"
        if is_list and not (field.is_text and len(self.values) == 1):
            return [field.flag, *self.values]
        return [f"{field.flag}={value}" for value in self.values]


def check_texts(setting: Setting) -> Setting:
    """Every value must be one line: it may become a line of a script, or a scalar of a file."""
    for value in setting.values:
        check_text(value, setting.field.name, where=setting.where, is_secret=setting.field.arg.is_secret)
    return setting


def as_typed(value: object) -> tuple[str, ...]:
    """A Python value as on the command line."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


def split_commas(text: str) -> list[str]:
    """`cuda/12,gcc/13` is two values. An empty place stays, and is refused by its field."""
    pieces = [[part for part in piece.split(" ") if part] or [""] for piece in text.split(",")]
    return [part for piece in pieces for part in piece]


def latest(settings: Iterable[Setting]) -> dict[str, Setting]:
    """The effective setting of each field: later ones replace earlier ones."""
    return {setting.field.name: setting for setting in settings}


def build(owner: type[T], settings: Iterable[Setting], **computed: Any) -> T:
    """The dataclass with these settings; other fields keep their defaults."""
    groups: dict[str, dict[str, Any]] = {"": dict(computed)}
    for setting in latest(settings).values():
        groups.setdefault(setting.field.group, {})[setting.field.attribute] = convert(setting)
    _refuse_missing(owner, groups[""])
    own = groups.pop("")
    if groups:
        hints = {item.name: item.default_factory for item in dataclasses.fields(owner)}  # type: ignore[arg-type]
        own |= {group: dataclasses.replace(hints[group](), **values) for group, values in groups.items()}  # type: ignore
    return owner(**own)


def _refuse_missing(owner: type, given: Mapping[str, Any]) -> None:
    for field in fields_of(owner).values():
        if field.default is MISSING and field.attribute not in given and not field.group:
            name = field.flag if field.arg.place == "flag" else field.shown
            allowed = field.expects if field.choices or field.arg.allowed else None
            raise UserError(f"{name} is missing", got="none", allowed=allowed, hint=field.help or None)


def convert(setting: Setting) -> Any:
    """The value of a field from its text, checked by the rules of the field."""
    field = setting.field
    if field.is_tuple:
        return tuple(_convert_one(field, text, setting) for text in setting.values)
    if len(setting.values) != 1:
        raise invalid(setting, " ".join(setting.values))
    return _convert_one(field, setting.values[0], setting)


def _convert_one(field: FieldSpec, text: str, setting: Setting) -> Any:
    if field.arg.parse is not None:
        return field.arg.parse(text, setting)
    if field.choices:
        if text not in field.choices:
            raise invalid(setting, text)
        return get_args(field.inner)[field.choices.index(text)]
    if field.is_bool:
        if text not in ("true", "false"):
            raise invalid(setting, text)
        return text == "true"
    if field.inner in (int, float):
        return _number(field, text, setting)
    if field.inner is Path and not text:
        raise UserError(f"{field.flag} needs a value", where=setting.where, allowed=field.expects)
    return field.inner(text)


def _number(field: FieldSpec, text: str, setting: Setting) -> int | float:
    try:
        value: int | float = field.inner(text)
    except ValueError:
        raise invalid(setting, text) from None
    # No count, size or time needs more than 64 bits. A longer number overflows in a division.
    is_too_long = isinstance(value, int) and not -(2**63) <= value < 2**63
    if is_too_long or not math.isfinite(value) or (field.range and not field.range.holds(value)):
        raise UserError(
            f"{field.name} is out of range",
            where=setting.where,
            got=f"{str(value)[:20]}..., a number of {len(str(value))} digits" if is_too_long else value,
            allowed=field.expects + (", below 2**63" if is_too_long else ""),
        )
    return value


def invalid(setting: Setting, text: str, allowed: str = "", hint: str | None = None) -> UserError:
    """The error for a value that a field does not accept."""
    field = setting.field
    if hint is None and field.choices:
        close = difflib.get_close_matches(text, field.choices, n=1)
        hint = f"{_name_at(setting)} {close[0]}" if close else None
    return UserError(
        f"{field.name}: {printable_line(text[:200])!r} is not valid",
        where=setting.where,
        allowed=allowed or field.expects,
        hint=hint,
    )


def _name_at(setting: Setting) -> str:
    return f"{setting.field.name}:" if setting.kind in ("file", "site") else setting.field.flag


def find_in(table: Mapping[str, FieldSpec], key: str) -> FieldSpec | None:
    """The field of this key, flag (without dashes) or alias."""
    name = key.replace("-", "_")
    if name in table:
        return table[name]
    return next((field for field in table.values() if name.replace("_", "-") in field.aliases), None)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    names = list(known)
    # "batch_size" should find "global_batch_size" although half of its letters are missing.
    found = (
        difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        or [other for other in names if name and name in other]
        or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    )
    return found[0] if found else None


def unknown_name(key: str, where: str, table: Mapping[str, FieldSpec], help_command: str = "train") -> UserError:
    """The error for an unknown key or flag, with the known one that was probably meant."""
    is_flag, name = key.startswith("-"), key.lstrip("-").replace("-", "_")
    known = [*table, *(alias.replace("-", "_") for field in table.values() for alias in field.aliases)]

    def shown(other: str) -> str:
        return "--" + other.replace("_", "-") if is_flag else other

    if RENAMED.get(name) in table:
        return UserError(f"{shown(name)} has a new name", where=where, got=key, hint=shown(RENAMED[name]))
    elsewhere = table.get(_NAMES_ELSEWHERE.get(name.lower(), ""))
    if elsewhere is not None:
        hint = f"{shown(elsewhere.name)}: {elsewhere.help}"
        return UserError(f"unknown {'flag' if is_flag else 'key'} {key!r}", where=where, hint=hint)
    meant = closest(name, known)
    hint = f"perhaps you meant {shown(meant)}" if meant else f"paceline {help_command} --help lists them all"
    few = ", ".join(map(shown, table)) or "none"
    allowed = few if len(table) <= 12 and not meant else None
    return UserError(f"unknown {'flag' if is_flag else 'key'} {key!r}", where=where, allowed=allowed, hint=hint)


def read_number(name: str, default: float, environment: Mapping[str, str] = os.environ) -> float:
    """A finite number from 0. An empty variable counts as not set."""
    return float(_read(name, float, _FROM_ZERO, default, environment))


def read_whole(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """Like `read_number`, for a whole number."""
    return int(_read(name, int, _WHOLE, default, environment))


def _read(name: str, kind: type, allowed: Range, default: float, environment: Mapping[str, str]) -> Any:
    text = environment.get(name, "")
    field = FieldSpec(name, name, object, "", kind, default, "", allowed)
    return convert(Setting(field, (text,), "environment", f"environment variable {name}")) if text else default


def check_numbers() -> None:
    """Check all variables at the start of a run: some are used only at its end."""
    for name in (STORAGE_PATIENCE, STORE_TIMEOUT, START_TIMEOUT):
        read_number(name, 0.0)
    read_whole(MAX_REQUEUES, 0)


def cache_folder() -> Path:
    """$PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    base = os.environ.get("PACELINE_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
