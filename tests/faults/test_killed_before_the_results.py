"""Fault: a rank is killed after its last step and before results.json. The next attempt has no step to train."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.runs import QUICK, read_results
from harness.short_run import injected_faults
from paceline.errors import UserError
from paceline.library.compare import compare
from paceline.metrics.recorder import read_rows, seconds_of_steps
from paceline.runs.catalog import read_entry
from paceline.runs.folder import RunFolder
from paceline.tools.study.collect import measure_run
from paceline.tools.study.grid import Cell
from paceline.training.earlier_figures import recorded_speed

STEPS = 18
KILL = f"kill rank=0 step={STEPS} phase=finish"


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    flags = [*QUICK, "--processes=1", "--output-dir=run", "--json", f"--inject={KILL}"]
    answer = paceline("train", "shapes-cnn", *flags, cwd=folder)
    assert answer.code == 0, answer
    assert len(injected_faults(folder / "run")) == 1
    last = json.loads(answer.out.splitlines()[-1])
    assert last["samples_per_second"] == read_results(folder / "run")["samples_per_second"]
    return folder / "run"


def test_the_results_have_the_speed_of_the_recorded_steps(restarted: Path) -> None:
    results = read_results(restarted)
    seconds = seconds_of_steps(read_rows(restarted / "metrics.jsonl"), 64)
    assert results["training_seconds"] == seconds > 0
    assert results["samples_per_second"] == results["performance"]["samples_per_second"] == STEPS * 64 / seconds
    assert results["performance"]["total_samples_processed"] == STEPS * 64
    assert results["performance"]["time_per_epoch"] > 0
    assert results["speed_note"]
    assert results["clocks"]["first_to_last_step_seconds"] is None
    (rank,) = results["process_metrics"]
    assert (rank["samples"], rank["seconds"], rank["samples_per_second"]) == (0, None, None)


def test_a_further_start_keeps_them(restarted: Path) -> None:
    before = read_results(restarted)
    answer = paceline("train", "run/config.yaml", "--resume=auto", "--output-dir=run", cwd=restarted.parent)
    assert answer.code == 0, answer
    assert read_results(restarted) == before


def test_commands_and_the_page_show_that_speed(restarted: Path) -> None:
    results, entry = read_results(restarted), read_entry(restarted)
    assert entry.images_per_s
    assert entry.images_per_s > 0
    page = (restarted / "report.html").read_text()
    assert f"{results['samples_per_second']:,.0f}" in page
    assert results["speed_note"] in page
    copy = shutil.copytree(restarted, restarted.parent / "copy", symlinks=True)
    first, _ = compare([restarted, copy]).to_json()["runs"]
    assert first["results"]["samples_per_second"] == results["samples_per_second"]


def test_a_study_leaves_the_run_out_with_the_reason(restarted: Path) -> None:
    with pytest.raises(UserError) as caught:
        measure_run(RunFolder(restarted), Cell("ddp", 1, "strong", 1, 64), {})
    assert "no step" in str(caught.value.got)


@pytest.mark.parametrize(
    ("rows", "is_known"),
    [
        ([], False),
        ([{"kind": "step", "step": 2, "throughput": 10.0}], True),
        ([{"kind": "step", "step": 1, "throughput": 10.0}], False),  # the last step is not recorded
        (
            [{"kind": "epoch", "phase": "train", "step": 2, "seconds": 4.0, "ranks": {"samples": [10, 10]}}],
            False,  # trained on two ranks
        ),
        ([{"kind": "epoch", "phase": "train", "step": 2, "seconds": 4.0, "ranks": {"samples": [20]}}], True),
    ],
)
def test_a_speed_that_is_not_recorded_is_null_with_a_reason(rows: list[dict[str, object]], is_known: bool) -> None:
    found = recorded_speed(rows, steps=2, global_batch_size=10, world_size=1)
    assert (found["samples_per_second"] is not None) == (found["training_seconds"] is not None) == is_known
    assert found["samples_per_second"] != 0
    assert found["speed_note"]
