"""Optimizer settings that exclude each other give an error before the start."""

from __future__ import annotations

import pytest

from paceline.errors import UserError
from paceline.settings.load import load_config
from paceline.settings.rules import check_config


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--epochs", "4", "--warmup-epochs", "4"], "warmup_epochs"),
        (["--epochs", "4", "--warmup-epochs", "2", "--cooldown-epochs", "2"], "cooldown_epochs"),
        (["--epochs", "4", "--schedule", "steps", "--lr-steps", "2", "4"], "lr_steps"),
        (["--schedule", "steps", "--lr-steps", "5", "3"], "lr_steps"),
        (["--schedule", "steps"], "schedule"),
        (["--lr-steps", "3"], "lr_steps"),
        (["--min-lr", "0.001", "--schedule", "constant"], "min_lr"),
        (["--min-lr", "0.5", "--base-lr", "0.1"], "min_lr"),
        (["--warmup-start-lr", "0.001", "--schedule", "cosine", "--warmup-epochs", "0"], "warmup_start_lr"),
        (["--warmup-start-lr", "1", "--warmup-epochs", "1"], "warmup_start_lr"),
        (["--unfreeze-at", "2"], "unfreeze_at"),
        (["--freeze", "features", "--unfreeze-at", "1"], "unfreeze_at"),
        (["--freeze", "features", "--unfreeze-at", "5", "--epochs", "4"], "unfreeze_at"),
        (["--ema-warmup-epochs", "1"], "ema_warmup_epochs"),
        (["--ema-decay", "0.9", "--ema-warmup-epochs", "4", "--epochs", "4"], "ema_warmup_epochs"),
        (["--clip-norm", "1", "--clip-agc", "0.01"], "clip_agc"),
        (["--clip-norm", "1", "--clip-value", "1"], "clip_value"),
        (["--optimizer", "muon", "--layer-decay", "0.5"], "layer_decay"),
        (["--optimizer", "muon", "--head-lr-factor", "2"], "head_lr_factor"),
        (["--optimizer", "muon", "--no-decay-norms-and-biases"], "decay_norms_and_biases"),
    ],
)
def test_settings_without_a_required_other_setting_are_refused(flags: list[str], name: str) -> None:
    loaded = load_config("shapes-cnn", flags)
    with pytest.raises(UserError) as refused:
        check_config(loaded)
    assert refused.value.where == loaded.where(name)


@pytest.mark.parametrize("flag", ["--layer-decay=0", "--layer-decay=1.1", "--head-lr-factor=0", "--lr-steps=0"])
def test_numbers_out_of_range_are_refused(flag: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config("shapes-cnn", [flag])
    assert refused.value.allowed


def test_compatible_settings_are_accepted() -> None:
    flags = "--epochs 9 --schedule steps --lr-steps 3 6 --cooldown-epochs 1 --warmup-epochs 1 --warmup-start-lr 1e-6"
    more = "--min-lr 1e-5 --freeze features --unfreeze-at 2 --ema-decay 0.9 --ema-warmup-epochs 1"
    clip = "--clip-norm 0 --clip-agc 0.1"
    loaded = load_config("shapes-cnn", f"{flags} {more} {clip}".split())
    check_config(loaded)
    assert loaded.config.optim.lr_steps == (3, 6)
