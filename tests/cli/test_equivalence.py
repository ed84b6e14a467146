"""`paceline equivalence` checks that the result does not depend on the number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import assert_nothing_starts, environment, paceline
from harness.processes import seconds_until_empty
from harness.runs import read_results, step_losses
from paceline.cli.equivalence import ComparedRun, Study
from paceline.cli.main import main
from paceline.models.external import PER_RANK

TESTS = str(Path(__file__).resolve().parents[1])
QUICK = ["--num-samples=640", "--global-batch-size=64", "--epochs=1", "--max-steps=4"]
BATCHNORM = [*QUICK, "--model-name", "harness.batchnorm_model:build"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact study of a BatchNorm model on 1, 2 and 4 processes."""
    folder = tmp_path_factory.mktemp("exact")
    answer = paceline("equivalence", "shapes-cnn", *BATCHNORM, "--exact", cwd=folder, PYTHONPATH=TESTS)
    (folder / "answer.txt").write_text(answer.out)
    assert answer.code == 0, answer
    assert answer.err == ""
    assert PER_RANK not in answer.out  # lanes are part of the run
    return folder


def runs_of(folder: Path) -> list[Path]:
    (study,) = (folder / "runs").glob("equivalence-shapes-cnn-*")
    return [study / f"world-{size}" for size in (1, 2, 4)]


def test_exact_runs_have_the_same_bits_on_every_world_size(exact: Path) -> None:
    results = [read_results(run) for run in runs_of(exact)]
    assert [entry["world_size"] for entry in results] == [1, 2, 4]
    for name in ("weights_sha256", "optimizer_sha256"):
        assert len({entry[name] for entry in results}) == 1
    text = (exact / "answer.txt").read_text()
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert [row[-1] for row in rows[1:]] == ["same", "same"]
    short = [results[0][name][:12] for name in ("weights_sha256", "optimizer_sha256")]
    assert all(set(short) <= set(row) for row in rows)
    assert "equivalent: 4 steps give one answer on 1, 2 and 4 processes, to the last bit" in text


def test_every_step_is_logged_and_no_tracker_written(exact: Path) -> None:
    for run in runs_of(exact):
        assert len(step_losses(run)) == 4
        assert not (run / "tensorboard").exists()


def test_compare_agrees(exact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, runs_of(exact))]) == 0
    out = capsys.readouterr().out
    assert out.count("are equal: final weights and optimizer") == 2
    assert ["lanes"] not in [line.split()[:1] for line in out.splitlines()]  # all runs had the same settings


def test_exact_compares_the_hashes_and_not_only_the_losses() -> None:
    outcome = ComparedRun(2, {}, [], loss_difference=0.0, same_hashes=False)
    studies = [Study([1, 2], 0.0, is_exact, False, False, {}, {}) for is_exact in (True, False)]
    assert [study.accepts(outcome) for study in studies] == [False, True]


def test_batchnorm_without_exact_differs_and_the_reason_is_given(tmp_path: Path) -> None:
    flags = [*BATCHNORM, "--world-sizes", "1,2", "--output-dir", "study"]
    answer = paceline("equivalence", "shapes-cnn", *flags, cwd=tmp_path, PYTHONPATH=TESTS)
    assert answer.code == 1, answer
    assert "DIFFERENT" in answer.out
    assert "NOT equivalent: 2 processes give another answer than 1" in answer.out
    assert "BatchNorm" in answer.out
    assert "--sync-bn or --exact" in answer.out
    first, second = (step_losses(tmp_path / "study" / f"world-{size}") for size in (1, 2))
    gap = max(abs(a - b) for a, b in zip(first, second, strict=True))
    assert f"{gap:.3g}" in answer.out


def test_without_exact_a_plain_model_agrees_within_the_tolerance(tmp_path: Path) -> None:
    flags = [*QUICK, "--world-sizes=2,1", "--max-steps=2", "--output-dir=study"]
    answer = paceline("equivalence", *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "equivalent: 2 steps give one answer on 2 and 1 processes, within 1e-05" in answer.out


def test_the_recipe_with_dropout_is_equivalent(tmp_path: Path) -> None:
    """Dropout of our models is drawn per sample: the same result without --exact."""
    flags = ["synthetic-mlp", "--num-samples=1280", "--max-steps=5", "--world-sizes=1,2,4", "--output-dir=study"]
    answer = paceline("equivalence", *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert PER_RANK not in answer.out
    assert len(step_losses(tmp_path / "study" / "world-4")) == 5


@pytest.mark.parametrize(("function", "code"), [("build", 1), ("build_by_sample", 0)])
def test_the_limit_of_external_models_is_stated(tmp_path: Path, function: str, code: int) -> None:
    """torch's dropout in an external model is drawn per rank. With our layer the model is equivalent."""
    flags = [*QUICK, "--model-name", f"harness.dropout_model:{function}", "--world-sizes=1,2", "--output-dir=study"]
    answer = paceline("equivalence", "shapes-cnn", *flags, cwd=tmp_path, PYTHONPATH=TESTS)
    assert answer.code == code, answer
    assert PER_RANK in answer.out


def test_a_failed_run_ends_the_study_with_its_error_and_code(tmp_path: Path) -> None:
    answer = paceline("equivalence", *QUICK, "--base-lr=1e30", "--output-dir=study", cwd=tmp_path)
    assert answer.code == 5, answer
    assert answer.err.startswith("error: the loss is")
    assert answer.err.count("error: ") == 1
    assert "the run on 1 process failed with exit code 5" in answer.out
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["world-1"]


def test_an_interrupt_ends_the_current_run(tmp_path: Path) -> None:
    flags = ["--num-samples=640", "--global-batch-size=64", "--epochs=500", "--max-steps=4000", "--output-dir=study"]
    arguments = [sys.executable, "-m", "paceline", "equivalence", "--world-sizes", "2,1", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=environment(), text=True, start_new_session=True, stdout=pipe, stderr=pipe
    ) as process:
        metrics = tmp_path / "study" / "world-2" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):  # until the first step
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # like a terminal on Ctrl-C
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors, errors  # the first process that handled it
    seconds_until_empty(tmp_path, limit_s=20)


WRONG = {
    "no value": (["--world-sizes"], ["--world-sizes needs a value"]),
    "one size": (["--world-sizes", "2"], ["at least two different", "--world-sizes 1,2,4"]),
    "not a number": (["--world-sizes", "1,two"], ["'two'", "two or more"]),
    "no process": (["--world-sizes=0,1"], ["out of range", "from 1 up to"]),
    "a size twice": (["--world-sizes=2,2"], ["at least two different"]),
    "an empty place": (["--world-sizes=1,,2"], ["world_sizes: '' is not valid"]),
    "an absurd size": (["--world-sizes=1,99999"], ["up to 1024"]),
    "indivisible": (["--world-sizes=1,3"], ["256 is not divisible by 3", "--world-sizes with 2 or 4"]),
    "exact on three": (["--world-sizes=1,3", "--exact"], ["power of two"]),
    "too few lanes": (["--exact", "--lanes=2"], ["2 lanes cannot be shared equally by 4 ranks"]),
    "tolerance": (["--tolerance", "small"], ["tolerance: 'small'"]),
    "negative tolerance": (["--tolerance=-1"], ["0 or more"]),
    "tolerance of bits": (["--tolerance=1e-3", "--exact"], ["exact runs are equal or not"]),
    "processes": (["--processes", "2"], ["equivalence decides the number of processes"]),
    "an alias of it": (["--world-size=2"], ["equivalence decides the number of processes"]),
    "one process only": (["--strategy", "single"], ["single runs on one process"]),
    "resume": (["--resume", "auto"], ["starts fresh"]),
    "an unknown flag": (["--epoch", "2"], ["unknown flag '--epoch'"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_starts_no_training(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags, parts = WRONG[case]
    assert_nothing_starts(capsys, tmp_path, ["equivalence", "shapes-cnn", *flags], *parts)


def test_a_folder_with_a_run_is_not_used_again(exact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = runs_of(exact)[0].parent
    assert main(["equivalence", "shapes-cnn", "--output-dir", str(study)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_equivalence_is_refused_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    assert main(["equivalence", "shapes-cnn"]) == 2
    assert "starts its own processes" in capsys.readouterr().err
