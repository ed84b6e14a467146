"""`paceline checkpoints` lists what a run has saved, and whether it is complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from faults.damage import FILES, cut, flip_a_bit
from faults.finished_run import DAMAGED, NEWEST
from harness.cli import command, paceline
from paceline.cli.command import run_verb


def test_the_list_shows_every_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("checkpoints", [str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["verified"], listed["set_aside"]) == (False, [])
    entries = listed["checkpoints"]
    assert [(entry["step"], entry["epoch"]) for entry in entries] == [(9, 1.0), (12, 1.33), (16, 1.78), (18, 2.0)]
    assert [entry["is_latest"] for entry in entries] == [False, False, False, True]
    assert sum(entry["is_best"] for entry in entries) == 1
    assert all((entry["world_size"], entry["strategy"]) == (1, "single") for entry in entries)
    has_validation = [entry["validation_accuracy"] is not None for entry in entries]
    assert has_validation == [True, False, False, True]
    sizes = [
        sum((run / "checkpoints" / entry["name"] / file).stat().st_size for file in FILES[:3]) for entry in entries
    ]
    assert [entry["size_bytes"] for entry in entries] == sizes

    assert run_verb("checkpoints", [str(run / "checkpoints"), "--verify"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert " ".join(table[0].split()) == "step epoch val acc val loss size saved by marks verdict"
    assert [line.split()[-1] for line in table[1:]] == ["whole"] * 4


def test_without_verify_only_sizes_are_checked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit("model.safetensors", 0.9, 0, run / "checkpoints" / NEWEST)
    assert run_verb("checkpoints", [str(run)]) == 0
    cut("model.safetensors", lambda size: size - 1, run / "checkpoints" / NEWEST)
    assert run_verb("checkpoints", [str(run)]) == DAMAGED
    assert "1 of 4 damaged" in capsys.readouterr().out


def test_the_list_needs_no_torch(run: Path, tmp_path: Path) -> None:
    probe = "import sys; from paceline.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    answer = command(sys.executable, "-c", probe, "checkpoints", str(run), "--verify", cwd=tmp_path)
    assert answer.out.splitlines()[-1] == "0 False", answer


def test_a_run_without_checkpoints_and_a_folder_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    empty = paceline("checkpoints", "run", cwd=tmp_path)
    assert (empty.code, empty.out) == (0, "no checkpoints in run/checkpoints\n")
    for arguments, part in [
        (["nowhere"], "not a run folder"),
        (["run", "--verfy"], "unknown flag"),
        (["run", "run"], "unexpected argument 'run'"),
    ]:
        answer = paceline("checkpoints", *arguments, cwd=tmp_path)
        assert answer.code == 2
        assert part in answer.err
    assert "usage" in paceline("checkpoints", "--help", cwd=tmp_path).out
