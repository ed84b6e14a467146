"""`paceline study collect`: a table of runs that were started by hand, with a reason for each excluded run."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from harness.cli import Answer, paceline
from paceline.runs.folder import write_json

FLAGS = [
    "synthetic-mlp",
    "--num-samples=640",
    "--epochs=2",
    "--track",
    "--quiet",
    "--omp-num-threads=1",
    "--device=cpu",
]
RUNS = {
    "one": ["--processes=1", "--global-batch-size=64"],
    "two": ["--processes=2", "--global-batch-size=64"],
    "again": ["--processes=2", "--global-batch-size=64", "--seed=8", "--base-lr=0.02"],
    "sharded": ["--processes=2", "--global-batch-size=64", "--strategy=fsdp"],
    "weak": ["--processes=2", "--global-batch-size=128"],
    "odd-batch": ["--processes=2", "--global-batch-size=96"],
    "other-model": ["--processes=1", "--global-batch-size=64", "--hidden-size=32"],
    "failed": ["--processes=1", "--global-batch-size=64", "--inject=raise rank=0 step=3", "--max-restarts=0"],
}


pytestmark = pytest.mark.slow  # trains eight runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-hand")
    for name, flags in RUNS.items():
        answer = paceline("train", *FLAGS, *flags, f"--output-dir=runs/{name}", cwd=folder)
        assert answer.code == (70 if name == "failed" else 0), answer
    (folder / "runs" / "letters").mkdir()
    return folder


def collect(place: Path, *arguments: str) -> Answer:
    return paceline("study", "collect", *arguments, cwd=place)


def rows_of(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def lines_of(answer: Answer) -> dict[str, str]:
    """The table by the name of the run."""
    return {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}


def test_every_run_is_in_the_table_as_a_cell_or_with_its_reason(place: Path) -> None:
    """Failed runs, other work, other batches and folders without results are named. The others are rows."""
    names = [*RUNS, "letters", "absent"]
    answer = collect(place, *(f"runs/{name}" for name in names), "runs/one", "--output-dir=table")
    assert answer.code == 0, answer
    rows = rows_of(place / "table")
    cells = {name: (row["method"], row["gpus"], row["scaling"], row["repeat"]) for name, row in rows.items()}
    assert cells == {
        "one": ("ddp", "1", "strong", "1"),
        "two": ("ddp", "2", "strong", "1"),
        "again": ("ddp", "2", "strong", "2"),
        "sharded": ("fsdp", "2", "strong", "1"),
        "weak": ("ddp", "2", "weak", "1"),
    }
    lines = lines_of(answer)
    reasons = {
        "odd-batch": "global batch 96",
        "other-model": "hidden_size 32",
        "failed": "no results: failed: rank 0 ended with injected",
        "runs/letters": "this is not a run folder",
        "runs/absent": "this is not a run folder",
    }
    for name, reason in reasons.items():
        assert "left out: " in lines[name], answer
        assert reason in lines[name], answer
    assert answer.out.count("given twice") == 1
    assert "other base_lr" in lines["again"]
    page = (place / "table" / "report.html").read_text()
    assert all(reason in page for reason in ("global batch 96", "hidden_size 32", "injected"))


def test_the_numbers_equal_those_of_a_study(place: Path) -> None:
    """A run started by hand and the same folder as a cell of a study give the same row."""
    cells = place / "study" / "cells"
    cells.mkdir(parents=True)
    shutil.copytree(place / "runs" / "two", cells / "ddp-2-r1")
    shared = {"recipe": "synthetic-mlp", "name": "synthetic-mlp", "flags": [], "stated": []}
    grid = {"world_sizes": [2], "strategies": ["ddp"], "repeats": 1, "scaling": "strong", "global_batch_size": 64}
    write_json(place / "study" / "study.json", {**shared, **grid})
    assert paceline("study", "report", "study", cwd=place).code == 0
    assert collect(place, "two", "--output-dir=alone").code == 0
    (mine,), (theirs,) = rows_of(place / "alone").values(), rows_of(place / "study").values()
    assert {**mine, "run": ""} == {**theirs, "run": ""}


def test_a_collected_table_can_predict_other_sizes(place: Path) -> None:
    """`study predict` accepts the folder."""
    assert collect(place, "one", "two", "--output-dir=both").code == 0
    answer = paceline("study", "predict", "both", "--world-sizes=4", "--json", cwd=place)
    assert answer.code == 0, answer
    assert len(json.loads(answer.out)) == 1


def test_a_resumed_run_is_marked(place: Path) -> None:
    """Its times are from its last part."""
    flags = [flag for flag in FLAGS if not flag.startswith("--epochs")]
    again = paceline(
        "train", *flags, "--epochs=3", "--processes=1", "--global-batch-size=64", "--resume=runs/one",
        "--output-dir=runs/longer", cwd=place,
    )  # fmt: skip
    assert again.code == 0, again
    answer = collect(place, "one", "longer", "--output-dir=parts")
    assert "resumed" in lines_of(answer)["longer"], answer


def test_without_a_result_there_is_no_study(place: Path) -> None:
    """Exit code 1, the reasons in the table, and no folder. Without a run it is a user error."""
    answer = collect(place, "failed", "letters", "--output-dir=nothing")
    assert answer.code == 1, answer
    assert answer.out.count("left out: ") == 2
    assert not (place / "nothing").exists()
    assert collect(place).code == 2
    assert collect(place, "one", "--repeats=2").code == 2
