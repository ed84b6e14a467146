"""A sweep: its cells, the summary of their results, and one screen for a mistake."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import paceline
from paceline.errors import UserError
from paceline.launch.request import read_request
from paceline.tools.study.collect import Measured
from paceline.tools.study.grid import Asked, continue_study, plan_study, write_spec
from paceline.tools.study.shared_settings import shared_settings
from paceline.tools.study.sweep import (
    SweepSpec,
    continue_sweep,
    make_points,
    parse_axes,
    read_sweep,
    write_sweep,
)
from paceline.tools.study.sweep_report import (
    collect_results,
    describe_results,
    make_sweep_charts,
    metric_with_values,
    write_sweep_report,
)


def spec_of(*words: str, random: int = 0, flags: tuple[str, ...] = ()) -> SweepSpec:
    points = make_points(parse_axes(words, is_random=random > 0), random)
    return SweepSpec("shapes-cnn", "shapes-cnn", flags, points, world_size=1, global_batch_size=64)


def measured(spec: SweepSpec, accuracies: list[float | None], losses: list[float] | None = None) -> list[Measured]:
    cells = list(spec.cells())
    return [
        Measured(cell, 1.0, 0.1, 100.0, best_val_accuracy=value, best_val_loss=loss, test_accuracy=0.5, run=cell.name)
        for cell, value, loss in zip(cells, accuracies, losses or [1.0] * len(cells), strict=True)
    ]


def test_a_grid_has_every_combination_once_and_all_points_of_a_seed_first() -> None:
    spec = spec_of("base_lr=0.1,0.2", "seed=1..2", "optimizer=sgd,adamw")
    points = [dict(point) for point in spec.points]
    assert len(points) == 8
    assert [point["seed"] for point in points] == ["1"] * 4 + ["2"] * 4
    assert len({cell.name for cell in spec.cells()}) == 8
    assert {cell.without_seed for cell in spec.cells()} == {
        (("base_lr", lr), ("optimizer", optimizer)) for lr in ("0.1", "0.2") for optimizer in ("sgd", "adamw")
    }


def test_random_points_stay_the_same_when_more_are_drawn() -> None:
    few = spec_of("base_lr=0.01..1", "weight_decay=0,5e-4", "seed=1..3", random=4)
    many = spec_of("base_lr=0.01..1", "weight_decay=0,5e-4", "seed=1..3", random=9)
    assert set(few.points) < set(many.points)
    assert len(few.points) == 12
    drawn = [float(dict(point)["base_lr"]) for point in many.points]
    assert all(0.01 <= value <= 1 for value in drawn)
    assert min(drawn) < 0.1 < max(drawn)  # on a logarithmic scale


def test_a_command_has_its_settings_and_continues_in_its_folder(tmp_path: Path) -> None:
    spec = spec_of("model_name=a/b.py:build,cnn", flags=("--epochs=2",))
    first, second = spec.cells()
    assert "/" not in first.name
    assert spec.command(second, tmp_path) == [
        *("train", "shapes-cnn", "--epochs=2", "--model-name=cnn", "--resume=auto"),
        f"--output-dir={tmp_path / 'cells' / second.name}",
    ]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("base_lr",),
        ("base_lr=",),
        ("base_lr=0.1,",),
        ("base_lr=0.1,0.1",),
        ("base_lr=0.1", "base-lr=0.2"),
        ("base_rate=0.1",),
        ("base_lr=0.1..0.2",),
        ("seed=3..1",),
        ("seed=0..5000",),
        ("output_dir=a,b",),
        ("amp=true,false",),
        ("metrics=a.py:f",),
        ("seed=0..999", "base_lr=0.1,0.2,0.3"),
    ],
)
def test_values_without_a_grid_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        spec_of(*words)


@pytest.mark.parametrize("words", [("seed=1..3",), ("base_lr=0.2..0.1",), ("model_name=0.1..0.2",)])
def test_values_that_cannot_be_drawn_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        spec_of(*words, random=3)


def test_a_sweep_can_grow_and_refuses_other_settings(tmp_path: Path) -> None:
    first = spec_of("base_lr=0.1,0.2", "seed=1")
    write_sweep(tmp_path, first)
    assert read_sweep(tmp_path) == first
    grown = continue_sweep(tmp_path, spec_of("seed=1..2", "base_lr=0.2,0.4"))
    assert set(first.points) < set(grown.points)
    assert len(grown.points) == 5
    assert [cell.name for cell in grown.cells()][:2] == [cell.name for cell in first.cells()]
    for other in (spec_of("base_lr=0.1", "seed=1", flags=("--epochs=3",)), spec_of("momentum=0.9", "seed=1")):
        with pytest.raises(UserError, match="in this folder"):
            continue_sweep(tmp_path, other)
    whole = json.loads((tmp_path / "sweep.json").read_text())
    points: tuple[Any, ...] = (
        [],
        [[["base_lr", "1"]], [["seed", "1"]]],
        [[["base_lr"]]],
        [[["no_such_setting", "1"]]],
        [[[1, 2]]],
        7,
    )
    for damaged in ({"recipe": 1}, *({**whole, "points": found} for found in points)):
        (tmp_path / "sweep.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="cannot be read"):
            continue_sweep(tmp_path, first)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("text")
    with pytest.raises(UserError, match="do not belong"):
        continue_sweep(tmp_path / "other", first)


def test_an_edited_recipe_is_another_sweep(tmp_path: Path) -> None:
    """Finished cells and new ones would have other settings than the ones that are compared."""
    recipe, folder = tmp_path / "own.yaml", tmp_path / "sweep"
    words = ("sweep", str(recipe), "base_lr=0.1,0.2", "--dry-run", "--output-dir", str(folder))
    recipe.write_text("dataset: shapes\nepochs: 2\nmomentum: 0.9\n")
    settings = shared_settings(str(recipe), (), ["base_lr"])
    points = make_points(parse_axes(["base_lr=0.1"], is_random=False))
    write_sweep(folder, SweepSpec(str(recipe), "own", (), points, 1, 64, settings=settings))
    assert read_sweep(folder).settings == settings
    recipe.write_text("dataset: shapes\nepochs: 2\nmomentum: 0.9\nbase_lr: 0.3\nmax_restarts: 7  # of no effect\n")
    same = paceline(*words, cwd=tmp_path)
    assert (same.code, "2 cells" in same.out) == (0, True), same
    recipe.write_text("dataset: shapes\nepochs: 2\nmomentum: 0.5\n")
    answer = paceline(*words, cwd=tmp_path)
    assert (answer.code, "momentum: 0.5; there: 0.9" in answer.err) == (2, True), answer


def test_an_edited_recipe_is_another_study(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("dataset: shapes\nepochs: 2\nmomentum: 0.9\n")
    spec = plan_study(read_request(str(recipe), []), Asked(world_sizes=(1,)), [], place="slurm", threads=1)
    write_spec(tmp_path / "study", spec)
    assert continue_study(tmp_path / "study", spec) == spec
    recipe.write_text("dataset: shapes\nepochs: 2\nmomentum: 0.5\n")
    changed = plan_study(read_request(str(recipe), []), Asked(world_sizes=(1,)), [], place="slurm", threads=1)
    with pytest.raises(UserError):
        continue_study(tmp_path / "study", changed)


def test_results_are_means_over_seeds_best_first() -> None:
    spec = spec_of("base_lr=0.1,0.2,0.3", "seed=1..2")
    cells = measured(spec, [0.5, 0.9, 0.7, 0.7, 0.8, None], [3.0, 2.0, 1.0] * 2)
    results = collect_results(cells, "val_accuracy")
    assert [dict(result.point)["base_lr"] for result in results] == ["0.2", "0.3", "0.1"]
    assert results[0].mean == pytest.approx(0.85)
    assert results[0].deviation == pytest.approx(0.1 / 2**0.5)
    assert results[1].deviation is None  # one run
    assert "85.00% ± 7.07%" in "\n".join(describe_results(results, "val_accuracy"))
    by_loss = collect_results(cells, "val_loss")
    assert [dict(result.point)["base_lr"] for result in by_loss] == ["0.3", "0.2", "0.1"]


def test_without_a_validation_set_the_test_accuracy_ranks_the_cells() -> None:
    cells = measured(spec_of("base_lr=0.1,0.2"), [None, None])
    assert metric_with_values(cells, "val_accuracy") == "test_accuracy"
    assert len(collect_results(cells, "test_accuracy")) == 2


def test_a_regression_is_compared_by_its_loss() -> None:
    found = measured(spec_of("base_lr=0.1,0.2"), [None, None])
    cells = [replace(cell, test_accuracy=None) for cell in found]
    without_validation = [replace(cell, best_val_loss=None, test_loss=1.0) for cell in cells]
    assert metric_with_values(cells, "val_accuracy") == "val_loss"
    assert metric_with_values(without_validation, "val_accuracy") == "test_loss"


def test_charts_have_intervals_and_a_curve_for_each_combination_of_the_others() -> None:
    spec = spec_of("base_lr=0.01,0.1,1", "optimizer=sgd,adamw", "seed=1..2")
    results = collect_results(measured(spec, [0.1 * n for n in range(12)]), "val_accuracy")
    bars, curve = make_sweep_charts(results, "val_accuracy")
    assert len(bars.series[0].y) == 6
    assert [series.name for series in curve.series] == ["optimizer adamw", "optimizer sgd"]
    assert curve.x_log
    for series in curve.series:
        assert list(series.x) == [0.01, 0.1, 1.0]
        assert all(low < y < high for low, y, high in zip(series.low, series.y, series.high, strict=True))


def test_the_report_is_written_with_a_row_per_run(tmp_path: Path) -> None:
    spec = spec_of("base_lr=0.1,0.2", "seed=1..2")
    cells = measured(replace(spec), [0.5, 0.6, 0.7, 0.8])
    lines = write_sweep_report(tmp_path, spec, cells, "val_accuracy", [("some-cell", "<b>it failed")])
    assert any(line.startswith("best ") and "0.2" in line for line in lines)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["base_lr"], row["seed"], row["val_accuracy"]) for row in rows] == [
        *(("0.1", "1", "0.5"), ("0.2", "1", "0.6")),
        *(("0.1", "2", "0.7"), ("0.2", "2", "0.8")),
    ]
    page = (tmp_path / "report.html").read_text()
    assert "<b>it failed" not in page
    assert (tmp_path / "plots" / "combinations.png").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("base_lr=0.1,0.2",), "the recipe is missing"),
        (("shapes-cnn", "base_lr=0.1,-1"), "base-lr"),
        (("shapes-cnn", "base_lr=0.1", "--base-lr=0.2"), "--base-lr"),
        (("shapes-cnn", "base_lr=0.1", "--resume=auto"), "--resume"),
        (("shapes-cnn", "base_lr=0.1", "--time=5:00"), "--on slurm"),
        (("shapes-cnn", "global_batch_size=63,100", "--processes=3"), "global_batch_size 100"),
        (("shapes-cnn", "global_batch_size=64,many"), "global-batch-size"),
        (("shapes-cnn", "seed=-1"), "seed"),
    ],
)
def test_a_mistake_gives_one_screen_before_the_first_cell(
    tmp_path: Path, arguments: tuple[str, ...], part: str
) -> None:
    answer = paceline("sweep", *arguments, cwd=tmp_path)
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ")
    assert part in answer.err
    assert list(tmp_path.iterdir()) == []


def test_on_slurm_all_cells_are_one_array_without_a_cluster(tmp_path: Path) -> None:
    flags = ("--on=slurm", "--nodes=2", "--processes-per-node=2", "--time=10:00", "--dry-run")
    answer = paceline("sweep", "synthetic-mlp", "base_lr=0.1,0.2", "seed=1..3", *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "#SBATCH --array=0-5\n" in answer.out
    assert "#SBATCH --nodes=2\n" in answer.out
    commands = answer.out.rpartition(".commands\n")[2].splitlines()
    assert len(commands) == 6
    assert all("--resume=auto" in line and "--output-dir=" in line for line in commands)
    assert list(tmp_path.iterdir()) == []
    refused = paceline("sweep", "synthetic-mlp", "processes=1,2", *flags, cwd=tmp_path)
    assert refused.code == 2, refused
