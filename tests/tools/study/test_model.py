"""The performance model: its fit, its predictions, and the text and numbers around it."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.study_cells import made_cell, sixty_four_cells, write_made_page
from paceline.cli.main import main
from paceline.tools.study.answers import answer_all
from paceline.tools.study.collect import Measured, read_csv, write_csv
from paceline.tools.study.findings import find
from paceline.tools.study.model import TERMS, Link, fit, hold_out
from paceline.tools.study.statistics import mean, ratio, scaled_serial_fraction, serial_fraction, student_t

# Seconds per epoch that a public course recorded on 1, 2, 4 and 8 GPUs.
RECORDED = {"ddp": (7.44, 4.58, 2.15, 1.37), "fsdp": (8.36, 6.74, 3.92, 3.17)}


def recorded_cells(tmp_path: Path) -> list[Measured]:
    lines = ["method,gpus,epoch,time,val_loss,acc,peak_mem"]
    for method, times in RECORDED.items():
        lines += [f"{method},{gpus},10,{seconds},,72,100" for gpus, seconds in zip((1, 2, 4, 8), times, strict=True)]
    path = tmp_path / "results.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_csv(path)


@pytest.mark.parametrize("strategy", list(RECORDED))
def test_eight_gpus_are_predicted_from_one_two_and_four(tmp_path: Path, strategy: str) -> None:
    held = hold_out(recorded_cells(tmp_path), strategy)
    assert held is not None
    cell, said, error = held
    assert cell.cell.world_size == 8
    assert abs(error) < 0.15
    assert said.step_s.low is not None
    assert said.step_s.high is not None
    assert said.step_s.low <= cell.step_s <= said.step_s.high


def step_of(coefficients: dict[str, float], size: int, samples: float) -> tuple[float, float]:
    """Work and waits by the formula at the top of model.py."""
    work = coefficients["per_sample"] * samples + coefficients["fixed"]
    if size == 1:
        return work, 0.0
    ring = coefficients["bandwidth"] * 2 * (size - 1) / size
    return work, coefficients["entry"] + ring + coefficients["latency"] * math.log2(size)


@pytest.mark.parametrize("known", [True, False])
def test_a_machine_that_follows_the_model_is_predicted_exactly(known: bool) -> None:
    truth = {"per_sample": 1e-4, "fixed": 2e-3, "entry": 0.0, "bandwidth": 3e-3, "latency": 1e-3}
    cells = []
    for size in (1, 2, 4, 8, 16):
        work, waiting = step_of(truth, size, 1024 / size)
        cells.append(made_cell(size, 1024, work + waiting, waiting if known else None))
    model = fit(cells, "ddp")
    assert model is not None
    for size in (32, 64):
        # Least squares, so equal up to rounding. Without the phases it is ambiguous which terms carry it.
        assert model.predict(size, 1024 / size).step_s.value == pytest.approx(sum(step_of(truth, size, 1024 / size)))
    if known:
        for term in TERMS:
            assert model.coefficients[term] == pytest.approx(truth[term], abs=1e-9)


def test_no_term_is_negative() -> None:
    # Twice as fast as linear: an unbounded fit would need a negative constant.
    cells = [made_cell(1, 256, 1.0), made_cell(2, 256, 0.4), made_cell(4, 256, 0.15)]
    model = fit(cells, "ddp")
    assert model is not None
    assert min(model.coefficients.values()) >= 0
    assert model.predict(1024, 256 / 1024).step_s.value > 0


def test_a_given_link_replaces_the_fitted_one() -> None:
    cells = [made_cell(1, 256, 0.1, 0.0), made_cell(2, 256, 0.06, 0.01), made_cell(4, 256, 0.04, 0.015)]
    model = fit(cells, "ddp")
    assert model is not None
    slow, fast = Link(1e9, 50e-6), Link(400e9, 1e-6)
    assert slow.all_reduce_s(64, 4e6) == pytest.approx(2 * 63 / 64 * 4e6 * 8 / 1e9 + 2 * 6 * 50e-6)
    assert model.predict(64, 4, slow).step_s.value > model.predict(64, 4, fast).step_s.value
    difference = slow.all_reduce_s(64, 4e6) - fast.all_reduce_s(64, 4e6)
    assert model.predict(64, 4, slow).step_s.value - model.predict(64, 4, fast).step_s.value == pytest.approx(
        difference
    )


def test_one_size_has_no_model() -> None:
    assert fit([made_cell(2, 256, 0.1), made_cell(2, 256, 0.11, repeat=2)], "ddp") is None
    assert hold_out([made_cell(1, 256, 0.1), made_cell(2, 256, 0.06)], "ddp") is None


def test_statistics_by_hand() -> None:
    assert mean([5.0]).low is None
    found = mean([90.0, 100.0, 110.0])
    half = 4.303 * 10.0 / 100.0 / math.sqrt(3)
    assert (found.value, found.low, found.high) == (100.0, 100.0 * math.exp(-half), 100.0 * math.exp(half))
    doubled = ratio([20.0, 20.0], [10.0, 10.0])
    assert (doubled.value, doubled.low, doubled.high) == (2.0, 2.0, 2.0)
    wide = ratio([18.0, 22.0], [9.0, 11.0])
    assert wide.low is not None
    assert wide.high is not None
    assert wide.low < 2.0 < wide.high
    assert [student_t(n) for n in (1, 2.9, 15, 19, 25, 1000)] == [12.706, 4.303, 2.131, 2.131, 2.086, 1.980]
    # A fifth of the work is serial: Amdahl gives 1 / (0.2 + 0.8 / n), Gustafson n - 0.2 (n - 1).
    assert serial_fraction({n: 1 / (0.2 + 0.8 / n) for n in (2, 4, 8)}) == pytest.approx(0.2)
    assert scaled_serial_fraction({n: n - 0.2 * (n - 1) for n in (2, 4, 8)}) == pytest.approx(0.2)
    assert serial_fraction({1: 1.0}) is None


def test_repeats_with_a_large_spread_have_no_interval() -> None:
    """Two noisy repeats give no "44 % (0 % to 13830 %)". The text says why."""
    noisy = ratio([40.0, 90.0], [100.0, 200.0])
    assert (noisy.low, noisy.high, noisy.is_too_noisy) == (None, None, True)
    assert mean([1.0, 3.0]).is_too_noisy
    assert mean([1.0, 1e300]).is_too_noisy  # no overflow
    assert noisy.over(2).is_too_noisy
    assert " to " not in noisy.show("{:.0%}")
    assert not mean([100.0, 104.0]).is_too_noisy


def test_an_efficiency_above_110_percent_is_marked_as_suspect() -> None:
    """One rank ran slower than the others: the table and the text say so, with likely causes."""
    cells = [made_cell(n, 256, s, repeat=r) for n, s in ((1, 0.2), (2, 0.04)) for r in (1, 2, 3)]
    findings = find(cells)
    assert findings.scaled[1].efficiency.value == pytest.approx(2.5)
    answers = " ".join(answer.text for answer in answer_all(findings))
    assert "suspect" in answers
    assert "scales linearly" not in answers


def test_speedup_and_efficiency_are_relative_to_one_rank_of_the_same_strategy() -> None:
    cells = [made_cell(n, 256, s, repeat=r) for n, s in ((1, 0.1), (2, 0.06), (4, 0.04)) for r in (1, 2, 3)]
    findings = find(cells)
    assert [(s.kind.world_size, round(s.speedup.value, 6), round(s.efficiency.value, 6)) for s in findings.scaled] == [
        (1, 1.0, 1.0),
        (2, 1.666667, 0.833333),
        (4, 2.5, 0.625),
    ]


def test_a_loss_of_accuracy_is_reported_only_with_repeats() -> None:
    def words_for(accuracies: dict[int, list[float]]) -> str:
        cells = [
            dataclasses.replace(made_cell(n, 256, 0.1 / n, 0.0, repeat=number), test_accuracy=accuracy)
            for n, repeats in accuracies.items()
            for number, accuracy in enumerate(repeats, start=1)
        ]
        return {answer.question: answer.text for answer in answer_all(find(cells))}["Does accuracy hold?"]

    assert words_for({1: [0.151], 2: [0.149]}).startswith("**Yes, for DDP**")
    assert words_for({1: [0.90], 2: [0.87]}).startswith("**Unknown from one run each, for DDP**: 87.00% on 2 ranks")
    assert words_for({1: [0.90, 0.901, 0.899], 2: [0.87, 0.871, 0.869]}).startswith("**Not quite, for DDP**")
    assert words_for({1: [0.90, 0.80, 0.85], 2: [0.82, 0.83, 0.84]}).startswith("**Yes, for DDP**")


def test_the_text_matches_the_numbers() -> None:
    linear = [made_cell(n, 256, 0.1 / n, 0.0) for n in (1, 2, 4)]
    words = {answer.question: answer.text for answer in answer_all(find(linear))}
    assert "scales linearly" in words["Is scaling linear, and where does it stop?"]
    assert "Yes, for DDP" in words["Does accuracy hold?"]
    waiting = [made_cell(1, 256, 0.1, 0.0), made_cell(2, 256, 0.09, 0.04), made_cell(4, 256, 0.08, 0.055)]
    words = {answer.question: answer.text for answer in answer_all(find(waiting))}
    assert "stops scaling well at 2 ranks" in words["Is scaling linear, and where does it stop?"]
    assert "waiting for other ranks**: 69% of the step" in words["What is the bottleneck, and what to try next?"]


def test_results_survive_a_round_trip_through_csv(tmp_path: Path) -> None:
    cells = [made_cell(n, 256, 0.1 / n, 0.01 / n, repeat=r) for n in (1, 2) for r in (1, 2)]
    write_csv(tmp_path / "results.csv", cells)
    back = read_csv(tmp_path / "results.csv")
    assert [cell.cell for cell in back] == [cell.cell for cell in cells]
    # Seconds are written as milliseconds.
    assert [cell.step_s for cell in back] == pytest.approx([cell.step_s for cell in cells], rel=1e-12)
    assert [cell.peak_mb for cell in back] == [cell.peak_mb for cell in cells]
    header = (tmp_path / "results.csv").read_text().splitlines()[0]
    assert header.startswith("method,gpus,epoch,time,val_loss,acc,peak_mem,")


def test_sixty_four_cells_are_rendered_within_three_seconds(tmp_path: Path) -> None:
    cells = sixty_four_cells()
    assert len(cells) == 64
    find(cells[:8])  # numpy is imported by then
    began = time.perf_counter()
    page = write_made_page(tmp_path / "report.html", cells)
    assert time.perf_counter() - began < 3
    assert page.stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict"], "STUDY is missing"),
        (["predict", "nowhere"], "this is not a study"),
        (["predict", "results.csv", "--link", "fast"], "link: 'fast' is not valid"),
        (["predict", "results.csv", "--world-sizes", "0"], "world_sizes is out of range"),
        (["predict", "results.csv", "--world-sizes", "512"], "512 ranks share 256 samples"),
        (["predict", "results.csv", "--price", "-1"], "price is out of range"),
        (["predict", "results.csv", "--lnik", "1"], "perhaps you meant --link"),
        (["report"], "paceline study report STUDY"),
        (["shapes-cnn", "--world-sizes", "1,x"], "world_sizes: 'x' is not valid"),
        (["shapes-cnn", "--strategies", "dpp"], "strategies: 'dpp' is not valid"),
        (["shapes-cnn", "--repeats", "0"], "repeats is out of range"),
        (["shapes-cnn", "--on", "moon"], "on: 'moon' is not valid"),
        (["shapes-cnn", "--strategy", "ddp"], "the study decides this for each cell"),
        (["shapes-cnn", "--world-size", "1,2"], "--world-sizes 1,2,4"),
        (["shapes-cnn", "--world-sizes", "1,3"], "256"),
        (["shapes-cnn", "--wrold-sizes", "1"], "perhaps you meant --world-sizes"),
    ],
)
def test_wrong_input_of_a_study_gives_one_screen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    recorded_cells(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["study", *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "studies").exists()


def test_a_dry_run_shows_the_grid_and_starts_nothing(tmp_path: Path) -> None:
    answer = paceline("study", "shapes-cnn", "--world-sizes=1,2", "--strategies=ddp,fsdp", "--dry-run", cwd=tmp_path)
    assert answer.code == 0, answer
    assert "12 cells, 12 to run" in answer.out
    assert "paceline train shapes-cnn" in answer.out
    assert list(tmp_path.iterdir()) == []
