"""The tasks: which losses and metrics each one has, and the rules between these settings. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path

from paceline.errors import UserError
from paceline.settings.load import LoadedConfig
from paceline.settings.schema import Config
from paceline.settings.small_files import read_small

SINGLE_LABEL, MULTI_LABEL, REGRESSION = TASKS = ("single-label", "multi-label", "regression")
CROSS_ENTROPY, BCE, FOCAL, MSE, L1, HUBER = "cross-entropy", "bce", "focal", "mse", "l1", "huber"
LOSSES = {  # the first is the default
    SINGLE_LABEL: (CROSS_ENTROPY, BCE, FOCAL),
    MULTI_LABEL: (BCE, FOCAL),
    REGRESSION: (MSE, L1, HUBER),
}
MAXIMISED, MINIMISED = "max", "min"
METRICS = {  # the first is the default of --best-by
    SINGLE_LABEL: {
        "accuracy": MAXIMISED,
        "balanced_accuracy": MAXIMISED,
        "f1": MAXIMISED,
        "top5": MAXIMISED,
        "loss": MINIMISED,
    },
    MULTI_LABEL: {"map": MAXIMISED, "f1": MAXIMISED, "accuracy": MAXIMISED, "loss": MINIMISED},
    REGRESSION: {"mae": MINIMISED, "rmse": MINIMISED, "loss": MINIMISED},
}
LABEL_THRESHOLD = 0.5  # of several labels, those with a larger probability are given
TOP5_CLASSES = 6  # with fewer classes, five answers always hold the right one
BALANCED = "balanced"
_LARGEST_WEIGHT = 1e6
_LARGEST_FILE_BYTES = 1 << 24


def loss_name(config: Config) -> str:
    """The built-in loss, or the FILE.py:FUNCTION of the user."""
    return config.train.loss or LOSSES[config.data.task][0]


def has_own_loss(config: Config) -> bool:
    return ":" in config.train.loss


def best_metric(config: Config) -> tuple[str, str]:
    """The metric of --best-by, and whether it is maximised or minimised."""
    known = METRICS[config.data.task]
    direction, is_own, name = config.objective.best_by.rpartition(":")
    if is_own:
        return name, direction
    name = name or next(iter(known))
    return name, known.get(name, MAXIMISED)


def check_task(loaded: LoadedConfig) -> None:
    """The rules between task, loss, targets and metrics."""
    _check_loss(loaded)
    _check_soft_targets(loaded)
    _check_best_by(loaded)
    _check_sampling(loaded)
    _check_teacher(loaded)
    parse_class_weights(loaded.config.objective.class_weights, where=loaded.where("class_weights"))


def _check_loss(loaded: LoadedConfig) -> None:
    config, task = loaded.config, loaded.config.data.task
    name, allowed = loss_name(config), LOSSES[config.data.task]
    if ":" not in name and name not in allowed:
        raise UserError(
            f"there is no loss {name!r} for the task {task}",
            where=loaded.where("loss"),
            got=name,
            allowed=", ".join(allowed) + " or FILE.py:FUNCTION",
        )
    for field, is_given, needed in (
        ("bce_threshold", config.objective.bce_threshold > 0, (BCE,)),
        ("focal_gamma", loaded.origin("focal_gamma") == "flag", (FOCAL,)),
        ("class_weights", bool(config.objective.class_weights), (CROSS_ENTROPY, BCE, FOCAL)),
        ("label_smoothing", config.optim.label_smoothing > 0, (CROSS_ENTROPY, BCE)),
    ):
        if is_given and name not in needed:
            raise UserError(
                f"{field} is a part of {' and '.join(needed)}, and this run has the loss {name}",
                where=loaded.where(field),
                hint=f"leave it out, or --loss {needed[0]}"
                if ":" not in name
                else "leave it out, or do it in the loss itself",
            )
    if task == MULTI_LABEL and (config.optim.label_smoothing or config.objective.bce_threshold):
        field = "label_smoothing" if config.optim.label_smoothing else "bce_threshold"
        raise UserError(f"{field} is for single-label targets", where=loaded.where(field), got=f"task {task}")


def _check_soft_targets(loaded: LoadedConfig) -> None:
    """Mixup and CutMix give a share of each class instead of one class."""
    config = loaded.config
    alphas = [name for name in ("mixup_alpha", "cutmix_alpha") if getattr(config.data, name)]
    if not alphas:
        return
    what = alphas[0].partition("_")[0]
    if config.data.task == REGRESSION:
        raise UserError(
            f"{what} mixes classes, and a regression has none",
            where=loaded.where(alphas[0]),
            got="task regression",
            hint=f"leave out --{alphas[0].replace('_', '-')}",
        )
    if loss_name(config) == FOCAL:
        raise UserError(
            f"{what} gives soft targets, and the focal loss needs hard ones",
            where=f"{loaded.where(alphas[0])} and {loaded.where('loss')}",
            hint="--loss cross-entropy or --loss bce, or leave mixup and CutMix out",
        )


def _check_best_by(loaded: LoadedConfig) -> None:
    config, task = loaded.config, loaded.config.data.task
    own = [name.rpartition(":")[2] for name in config.train.metrics]
    direction, is_own, name = config.objective.best_by.rpartition(":")
    is_known = (direction in (MAXIMISED, MINIMISED) and name in own) if is_own else name in ("", *METRICS[task])
    if not is_known:
        yours = "; ".join(f"max:{metric} or min:{metric}" for metric in own)
        raise UserError(
            f"the task {task} has no such metric to select the best checkpoint by",
            where=loaded.where("best_by"),
            got=config.objective.best_by,
            allowed=", ".join(METRICS[task]) + (f"; {yours}" if own else ""),
        )


def _check_sampling(loaded: LoadedConfig) -> None:
    data = loaded.config.data
    if data.sampling == "balanced" and data.task != SINGLE_LABEL:
        raise UserError(
            "balanced sampling needs one class per sample",
            where=loaded.where("sampling"),
            got=f"task {data.task}",
            hint="--sampling uniform, or --sampling weighted with a weight of each sample",
        )


def _check_teacher(loaded: LoadedConfig) -> None:
    config = loaded.config
    if not config.objective.teacher:
        for name in ("distill", "distill_temperature", "distill_weight", "teacher_sha256"):
            if loaded.origin(name) == "flag":
                flag = name.replace("_", "-")
                raise UserError(
                    f"{name} needs a teacher", where=loaded.where(name), hint=f"--teacher RUN, or no --{flag}"
                )
        return
    is_soft = config.objective.distill == "soft" and config.data.task != REGRESSION
    if loaded.origin("distill_temperature") == "flag" and not is_soft:
        uses = "a regression" if config.data.task == REGRESSION else "hard distillation"
        raise UserError(
            f"distill_temperature has no effect: {uses} uses no probabilities of the teacher",
            where=loaded.where("distill_temperature"),
            hint="leave it out" + ("" if config.data.task == REGRESSION else ", or --distill soft"),
        )
    if config.data.task != SINGLE_LABEL and config.objective.distill == "hard":
        raise UserError(
            "hard distillation learns the most likely class, and this task does not have one",
            where=loaded.where("distill"),
            got=f"task {config.data.task}",
            hint="--distill soft",
        )


def parse_class_weights(texts: tuple[str, ...], *, where: str) -> tuple[float, ...] | None:
    """The numbers of --class-weights; None if they are balanced or not given. One text may be the name of a file."""
    if texts in ((), (BALANCED,)):
        return None
    if len(texts) == 1 and Path(texts[0]).is_file():
        where = texts[0]
        texts = tuple(read_small(Path(where), _LARGEST_FILE_BYTES).decode(errors="replace").replace(",", " ").split())
    numbers = [_number(text) for item in texts for text in item.split(",") if text.strip()]
    if not numbers or any(not 0 <= number <= _LARGEST_WEIGHT for number in numbers) or not any(numbers):
        wrong = [text for text, number in zip(texts, numbers, strict=False) if not 0 <= number <= _LARGEST_WEIGHT]
        raise UserError(
            "these are no class weights",
            where=where,
            got=" ".join(wrong[:4]) or "no weight above 0",
            allowed=f"a number from 0 to {_LARGEST_WEIGHT:,.0f} for each class, balanced, or a file of such numbers",
        )
    return tuple(numbers)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
