"""The rules between the settings of the optimizer, and between them and the length of the run."""

from __future__ import annotations

from paceline.errors import UserError
from paceline.settings.load import LoadedConfig
from paceline.settings.schema import SHARDED

_FALLING = ("linear", "cosine", "onecycle", "steps")  # schedules whose end min_lr can be


def check_optimization(loaded: LoadedConfig) -> None:
    _check_muon(loaded)
    _check_needed(loaded)
    _check_rates(loaded)
    _check_epochs(loaded)
    _check_clipping(loaded)


def _check_muon(loaded: LoadedConfig) -> None:
    config = loaded.config
    if config.optim.optimizer != "muon":
        return
    if config.parallel.strategy in SHARDED:
        raise UserError(
            f"muon needs whole weights, but {config.parallel.strategy} shards them",
            where=loaded.where("optimizer"),
            hint="--strategy ddp, or --optimizer adamw",
        )
    own = {"layer_decay": 1.0, "head_lr_factor": 1.0, "decay_norms_and_biases": True}
    for name, neutral in own.items():
        if getattr(config.optim, name) != neutral:
            raise UserError(
                f"muon has its own groups of parameters, and ignores {name}",
                where=loaded.where(name),
                hint=f"--optimizer adamw, or leave {name} out",
            )


def _check_needed(loaded: LoadedConfig) -> None:
    """Refuse settings without an effect."""
    optim = loaded.config.optim
    rises = optim.warmup_epochs > 0 or optim.schedule == "onecycle"
    pairs = (
        ("unfreeze_at", bool(optim.unfreeze_at), bool(optim.freeze), "freeze", "--freeze PATTERN"),
        ("warmup_start_lr", optim.warmup_start_lr > 0, rises, "a warm-up", "--warmup-epochs 1"),
        ("ema_warmup_epochs", optim.ema_warmup_epochs > 0, optim.ema_decay > 0, "ema_decay", "--ema-decay 0.999"),
        ("lr_steps", bool(optim.lr_steps), optim.schedule == "steps", "schedule steps", "--schedule steps"),
        ("schedule", optim.schedule == "steps", bool(optim.lr_steps), "lr_steps", "--lr-steps 30 60"),
        ("min_lr", optim.min_lr > 0, optim.schedule in _FALLING, "a schedule that falls", "--schedule cosine"),
    )
    for name, is_given, has_needed, needed, flag in pairs:
        if is_given and not has_needed:
            raise UserError(
                f"{name} needs {needed}",
                where=loaded.where(name),
                got=f"schedule {optim.schedule}" if name in ("lr_steps", "min_lr") else None,
                hint=f"add {flag}, or leave {name} out",
            )


def _check_rates(loaded: LoadedConfig) -> None:
    optim = loaded.config.optim
    for name in ("min_lr", "warmup_start_lr"):
        if getattr(optim, name) >= optim.base_lr:
            raise UserError(
                f"{name} is not below base_lr",
                where=loaded.where(name),
                got=f"{name} {getattr(optim, name):g}, base_lr {optim.base_lr:g}",
                allowed=f"less than {optim.base_lr:g}",
            )


def _check_epochs(loaded: LoadedConfig) -> None:
    """Every part of the schedule must fit into the epochs of the run."""
    optim, epochs = loaded.config.optim, loaded.config.train.epochs
    if optim.warmup_epochs >= epochs and optim.warmup_epochs > 0:
        raise UserError(
            "warm-up takes the whole run",
            where=loaded.where("warmup_epochs"),
            got=f"--warmup-epochs {optim.warmup_epochs:g}, --epochs {epochs}",
            allowed=f"less than {epochs}",
            hint=f"--warmup-epochs {epochs / 10:g}, or more --epochs",
        )
    if optim.cooldown_epochs and optim.warmup_epochs + optim.cooldown_epochs >= epochs:
        raise UserError(
            "warm-up and cool-down leave no epochs for the schedule",
            where=loaded.where("cooldown_epochs"),
            got=f"{optim.warmup_epochs:g} + {optim.cooldown_epochs:g} of {epochs} epochs",
            allowed=f"a cool-down of less than {epochs - optim.warmup_epochs:g} epochs",
            hint="a shorter --cooldown-epochs, or more --epochs",
        )
    if list(optim.lr_steps) != sorted(set(optim.lr_steps)):
        raise UserError(
            "lr_steps are not in increasing order",
            where=loaded.where("lr_steps"),
            got=" ".join(map(str, optim.lr_steps)),
            hint=f"--lr-steps {' '.join(map(str, sorted(set(optim.lr_steps))))}",
        )
    last = max(optim.lr_steps, default=0)
    for name, epoch in (("lr_steps", last), ("ema_warmup_epochs", optim.ema_warmup_epochs)):
        if epoch >= epochs and epoch > 0:
            raise UserError(
                f"{name} is after the end of the run",
                where=loaded.where(name),
                got=f"epoch {epoch:g} of {epochs}",
                allowed=f"less than {epochs}",
                hint="a smaller number, or more --epochs",
            )
    if optim.unfreeze_at and not 2 <= optim.unfreeze_at <= epochs:
        raise UserError(
            "unfreeze_at is not an epoch after the first",
            where=loaded.where("unfreeze_at"),
            got=f"epoch {optim.unfreeze_at} of {epochs}",
            allowed=f"2 to {epochs}" if epochs > 1 else "a run of two or more epochs",
            hint="leave --unfreeze-at out to keep the parameters frozen",
        )


def _check_clipping(loaded: LoadedConfig) -> None:
    optim = loaded.config.optim
    given = [name for name in ("clip_norm", "clip_value", "clip_agc") if getattr(optim, name)]
    if len(given) > 1:
        raise UserError(
            "gradients are clipped in one way only",
            where=loaded.where(given[-1]),
            got=" and ".join(f"{name} {getattr(optim, name):g}" for name in given),
            hint=", or ".join(f"--{name.replace('_', '-')} 0" for name in given),
        )
