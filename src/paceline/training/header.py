"""The header of a run, as lines of text: ranks, model, data, augmentation, batch, optimizer, steps."""

from __future__ import annotations

import torch

import paceline
from paceline.data.parts import TEST, TRAIN, VALIDATION
from paceline.data.sampling import UNIFORM
from paceline.models.external import PER_RANK, draws_per_rank, has_random_operations
from paceline.runs.catalog import recipe_of
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.settings.keep_rules import count_kept, epoch_length
from paceline.settings.schema import Config
from paceline.settings.tasks import (
    BALANCED,
    FOCAL,
    LOSSES,
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    best_metric,
    loss_name,
)
from paceline.training.audit_plan import describe_audit
from paceline.training.components import Components
from paceline.training.plan import RunPlan

_FEW_WEIGHTS = 6


def describe_run(components: Components, world: World, place: RunPlace) -> list[str]:
    """The header. A restart has a short one: only the ranks and the microbatches may have changed."""
    plan = components.plan
    audit = describe_audit(plan.config, world)
    ranks = f"{world}{_device_name(world.device)}"
    if place.is_restart:
        # --auto-microbatch may have changed the microbatches.
        batch = [f"batch     {describe_batch(plan)}"] if plan.config.train.accumulate > 1 else []
        return [f"paceline  continues on {ranks}", *batch, *([f"audit     {audit}"] if audit else [])]
    precision = str(components.model.autocast_dtype or "float32").removeprefix("torch.")
    return [
        f"paceline  {paceline.__version__}: {recipe_of(place.folder)} on {ranks}",
        f"model     {plan.config.model.model_name}, {components.num_parameters:,} parameters,"
        f" strategy {components.model.strategy}{_way(components)}, {precision}{_launches(components, world)}",
        f"data      {describe_data(plan)}",
        *([f"order     {plan.info.order}"] if plan.info.order else []),
        *([f"keep      {describe_kept(plan)}"] if plan.config.data.keep_share < 1 else []),
        f"augment   {components.train_data.pipeline.describe()}",
        f"batch     {describe_batch(plan)}",
        f"optimizer {describe_optimizer(plan)}",
        *([f"objective {objective}"] if (objective := describe_objective(plan.config)) else []),
        f"steps     {describe_steps(plan)}",
        *([f"audit     {audit}"] if audit else []),
        *([f"random    {PER_RANK}"] if _draws_per_rank(components) else []),
        *([] if RunFolder(place.folder).is_temporary else [f"folder    {place.folder}"]),
    ]


def _draws_per_rank(components: Components) -> bool:
    config = components.plan.config
    is_possible = draws_per_rank(config.model.model_name, is_exact=config.parallel.exact)
    return is_possible and has_random_operations(components.model.module)


def _way(components: Components) -> str:
    exchange = components.step.exchange
    return f" through {exchange}" if exchange == "shared memory" or exchange.endswith("bf16") else ""


def _launches(components: Components, world: World) -> str:
    """On a GPU: whether steps are compiled, and replayed as CUDA graphs."""
    if not world.device.startswith("cuda"):
        return ""
    compiled = ", compiled" if components.model.is_compiled else ""
    return f"{compiled}, steps {'' if components.step.is_recorded else 'not '}recorded"


def _device_name(device: str) -> str:
    return f", {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else ""


def describe_data(plan: RunPlan) -> str:
    info = plan.info
    folders = dict(info.folders)
    data = plan.config.data
    held_out = f"fold {data.fold} of {data.folds}" if data.folds else f"held out of {folders[TRAIN]}" if folders else ""
    validation = "own set" if info.num_validation else held_out
    origins = {**folders, VALIDATION: folders.get(VALIDATION, validation if plan.num_validation else "")}
    sizes = {TRAIN: plan.num_train, VALIDATION: plan.num_validation, TEST: info.num_test}
    parts = ", ".join(
        f"{size:,} {part}" + (f" ({origins[part]})" if origins.get(part) else "") for part, size in sizes.items()
    )
    skipped = f"; {info.num_skipped} skipped, listed by paceline data check" if info.num_skipped else ""
    inputs = "x".join(map(str, plan.input_shape))
    answers = {MULTI_LABEL: "labels", REGRESSION: "numbers"}.get(info.task, "classes")
    answers = "number" if info.task == REGRESSION and info.num_classes == 1 else answers
    return f"{info.name}: {parts} samples, {info.num_classes} {answers}, inputs {inputs}{skipped}"


def describe_kept(plan: RunPlan) -> str:
    """The samples of an epoch under --keep-share."""
    data = plan.config.data
    hardest, others = count_kept(data, plan.num_train)
    taken = f"the {hardest:,} samples with the highest loss under {data.keep_by}, and {others:,} others in turn"
    return f"{data.keep_share:g} of the training samples in each epoch: {taken}"


def describe_batch(plan: RunPlan) -> str:
    accumulate = plan.config.train.accumulate
    parts = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} x {plan.rank_batch_size}"
    parts += f" ({accumulate} microbatches of {plan.microbatch_size})" if accumulate > 1 else ""
    return f"{plan.config.train.global_batch_size} = {parts}; peak learning rate {plan.peak_lr:g}"


def describe_optimizer(plan: RunPlan) -> str:
    """All settings of the optimizer that have an effect."""
    optim = plan.config.optim
    parts: list[str] = [optim.optimizer]
    if optim.optimizer in ("sgd", "nesterov", "muon"):
        parts.append(f"momentum {optim.momentum:g}")
    parts += [f"weight decay {optim.weight_decay:g}", f"{optim.schedule} schedule"]
    values = {
        "warm-up epochs": optim.warmup_epochs,
        "cool-down epochs": optim.cooldown_epochs,
        "clip norm": optim.clip_norm,
        "clip value": optim.clip_value,
        "adaptive clipping": optim.clip_agc,
        "layer decay": optim.layer_decay if optim.layer_decay != 1 else 0,
        "head factor": optim.head_lr_factor if optim.head_lr_factor != 1 else 0,
        "label smoothing": optim.label_smoothing,
        "moving average": optim.ema_decay,
    }
    parts += [f"{name} {value:g}" for name, value in values.items() if value]
    return ", ".join([*parts, *([f"frozen: {' '.join(optim.freeze)}"] if optim.freeze else [])])


def describe_objective(config: Config) -> str:
    """What the run learns, where it differs from the cross entropy of one class per sample. Empty: in nothing."""
    options, data, loss = config.objective, config.data, loss_name(config)
    parts = [f"task {data.task}"] if data.task != SINGLE_LABEL else []
    if parts or loss != LOSSES[data.task][0]:
        gamma = f" (gamma {options.focal_gamma:g})" if loss == FOCAL else ""
        threshold = f" (targets above {options.bce_threshold:g} are 1)" if options.bce_threshold else ""
        parts.append(f"loss {loss}{gamma}{threshold}")
    if options.class_weights:
        weights = options.class_weights
        shown = BALANCED if weights == (BALANCED,) else " ".join(weights[:_FEW_WEIGHTS])
        parts.append(f"class weights {shown}{' ...' if len(weights) > _FEW_WEIGHTS else ''}")
    if data.sampling != UNIFORM or data.epoch_samples:
        samples = f" ({data.epoch_samples:,} samples an epoch)" if data.epoch_samples else ""
        parts.append(f"{data.sampling} sampling{samples}")
    if options.best_by or parts:
        parts.append(f"best by {best_metric(config)[0]}")
    if options.teacher:
        temperature = f", temperature {options.distill_temperature:g}" if options.distill == "soft" else ""
        how = f"{options.distill}, share {options.distill_weight:g}{temperature}"
        parts.append(f"teacher {options.teacher} ({how})")
    return ", ".join(parts)


def describe_steps(plan: RunPlan) -> str:
    repeats, epochs = plan.config.data.repeat_augment, plan.config.train.epochs
    length = epoch_length(plan.config.data, plan.num_train)
    left_out = length - plan.steps_per_epoch * plan.config.train.global_batch_size
    text = f"{epochs} epoch{'s' if epochs > 1 else ''} of {plan.steps_per_epoch}, {plan.total_steps} in all"
    if repeats > 1:
        taken = plan.steps_per_epoch * plan.config.train.global_batch_size // repeats
        text += f"; each epoch takes {taken} samples, different ones each time, {repeats} times each"
    elif left_out > 0:
        samples = "1 sample that does" if left_out == 1 else f"{left_out} samples that do"
        text += f"; each epoch leaves out {samples} not fill a batch, different ones each time"
    return text + (f"; ends at step {plan.last_step}" if plan.last_step < plan.total_steps else "")
