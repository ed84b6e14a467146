"""The learning rate as a function of the step."""

from __future__ import annotations

import pytest

from paceline.settings.schema import OptimConfig
from paceline.training.schedule import learning_rate, peak_learning_rate

STEPS_PER_EPOCH, TOTAL = 10, 100


def curve(**changes: object) -> list[float]:
    config = OptimConfig(**changes)  # type: ignore[arg-type]
    return [
        learning_rate(step, config=config, peak=1.0, steps_per_epoch=STEPS_PER_EPOCH, total_steps=TOTAL)
        for step in range(TOTAL)
    ]


def test_linear_scaling() -> None:
    assert peak_learning_rate(OptimConfig(base_lr=0.01), 256) == 0.01
    assert peak_learning_rate(OptimConfig(base_lr=0.01), 1024) == 0.04


def test_constant_with_warmup() -> None:
    assert curve(schedule="constant") == [1.0] * TOTAL
    warmed = curve(schedule="constant", warmup_epochs=0.5)
    assert warmed[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_falls_from_the_peak_to_almost_zero() -> None:
    rates = curve(schedule="cosine")
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.5)
    assert rates[-1] < 1e-3
    assert rates == sorted(rates, reverse=True)


def test_onecycle_rises_then_falls() -> None:
    rates = curve(schedule="onecycle")
    assert rates[0] == pytest.approx(1 / 25)
    assert rates.index(max(rates)) == 30
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert curve(schedule="onecycle", warmup_epochs=1.0).index(1.0) == 10


def test_warmup_starts_at_its_own_rate() -> None:
    rates = curve(schedule="constant", warmup_epochs=1.0, base_lr=0.5, warmup_start_lr=0.1)
    assert rates[0] == pytest.approx(0.2)  # a fifth of the peak, as 0.1 is of base_lr
    assert rates[5] == pytest.approx(0.6)
    assert rates[10:] == [1.0] * 90
    cycle = curve(schedule="onecycle", base_lr=0.5, warmup_start_lr=0.1)
    assert cycle[0] == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "onecycle"])
def test_the_schedule_ends_at_its_floor_and_the_cooldown_keeps_it(schedule: str) -> None:
    rates = curve(schedule=schedule, base_lr=0.5, min_lr=0.05, cooldown_epochs=2.0)
    assert rates[80:] == pytest.approx([0.1] * 20)
    assert 0.1 < rates[79] < 0.2
    assert max(rates) == 1.0


def test_steps_multiply_after_their_epochs() -> None:
    rates = curve(schedule="steps", lr_steps=(3, 6), lr_step_factor=0.1, base_lr=0.5, min_lr=0.025)
    assert rates[:30] == [1.0] * 30
    assert rates[30:60] == [0.1] * 30
    assert rates[60:] == pytest.approx([0.05] * 40)  # the floor: 0.01 would be below it
