"""`paceline train --json` for programs: rows on standard output, messages on standard error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import paceline

pytestmark = pytest.mark.terminal

USER = 2
QUICK = [
    *("--num-samples=320", "--global-batch-size=32", "--log-frequency=3", "--epochs=2", "--track", "--processes=1"),
    "--omp-num-threads=1",
]


def test_json_prints_rows_including_a_failure(tmp_path: Path) -> None:
    answer = paceline("train", *QUICK, "--json", "--output-dir=run", cwd=tmp_path)
    assert answer.code == 0, answer
    first, second, result = map(json.loads, answer.out.splitlines())
    assert [(row["kind"], row["epoch"], row["step"]) for row in (first, second)] == [("epoch", 1, 9), ("epoch", 2, 18)]
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert result["kind"] == "result"
    assert result["weights_sha256"] == results["weights_sha256"]
    assert any(line.startswith("step 3/18  epoch 1/2  loss ") for line in answer.err.splitlines())
    assert "everything is in run: " in answer.err
    flags = ["--json", "--output-dir=bad", "--inject", "nan step=4"]
    failed = paceline("train", *QUICK, *flags, cwd=tmp_path)
    assert failed.code == 5
    (row,) = map(json.loads, failed.out.splitlines())
    assert (row["kind"], row["status"], row["exit_code"]) == ("result", "failed", 5)
    both = paceline("train", "--json", "--quiet", cwd=tmp_path)
    assert (both.code, both.out) == (USER, "")
    assert "--quiet and --json" in both.err
