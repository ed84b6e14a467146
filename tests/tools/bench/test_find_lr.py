"""`paceline find-lr`: a sweep over learning rates, its suggestion and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline
from harness.ranks import run_ranks
from harness.runs import quick_config
from paceline.runtime.detect import World
from paceline.tools.bench.learning_rates import Point, RateSweep, describe, sweep, table_of

QUICK = ("--num-samples", "640", "--global-batch-size", "64")


def losses(*values: float) -> RateSweep:
    points = [Point(10.0**number, value, value) for number, value in enumerate(values, start=-5)]
    return RateSweep(points, has_diverged=True)


def test_a_tenth_of_the_rate_with_the_lowest_loss_is_suggested() -> None:
    found = losses(2.3, 2.3, 2.2, 1.9, 1.5, 3.0)
    assert found.suggested == pytest.approx(0.01)
    assert "--base-lr 0.01" in describe(found, (1e-5, 1.0))


def test_a_loss_that_only_rises_suggests_nothing() -> None:
    found = losses(2.3, 2.4, 2.5, 2.6, 2.7, 2.8)
    assert found.suggested is None
    assert "--rates" in describe(found, (1e-5, 1.0))


def sweep_losses(world: World, flags: tuple[str, ...]) -> tuple[list[float], bool]:
    found = sweep(quick_config(*flags), world, (1e-4, 1e6), 40)
    return [point.loss for point in found.points], found.has_diverged


def test_ranks_try_the_same_rates_and_stop_at_the_same_step() -> None:
    exact = ("--exact", "--lanes", "2")
    ((alone, has_diverged),) = run_ranks(1, sweep_losses, exact)
    assert run_ranks(2, sweep_losses, exact) == [(alone, has_diverged)] * 2
    assert has_diverged
    assert 5 < len(alone) < 40


def test_the_command_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    flags = (*QUICK, "--processes", "1", "--steps", "20", "--output", "rates.html")
    answer = paceline("find-lr", "shapes-cnn", *flags, cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert answer.out.split()[:3] == ["base_lr", "loss", "smoothed"]
    page = (tmp_path / "rates.html").read_text()
    assert "learning-rates" in page
    assert '"x_log": true' in page or '"x_log":true' in page
    assert [path.name for path in tmp_path.iterdir()] == ["rates.html"]


def test_the_table_is_short() -> None:
    points = [Point(float(number), 1.0, 1.0) for number in range(1, 1000)]
    assert len(table_of(RateSweep(points, has_diverged=False)).rows) <= 16


@pytest.mark.parametrize(
    "flags",
    [
        ("--rates", "1"),
        ("--rates", "1:1"),
        ("--rates", "0:1"),
        ("--rates", "1e-3:inf"),
        ("--steps", "1"),
        ("--output", "missing/page.html"),
        ("--freeze", "*", *QUICK),
    ],
)
def test_bad_input_of_find_lr_gives_one_screen(tmp_path: Path, flags: tuple[str, ...]) -> None:
    answer = paceline("find-lr", "shapes-cnn", *flags, "--processes", "1", cwd=tmp_path)
    assert answer.code == 2
    assert answer.err.count("error:") == 1
