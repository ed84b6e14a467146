"""`--debug` and `--trust-code` work in every command. After `--`, and in the text of a note, they are plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline
from harness.made_runs import make_run
from paceline.cli.main import main


@pytest.mark.parametrize("switch", ["--debug", "--trust-code"])
def test_after_two_dashes_a_switch_is_plain_text(switch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """doctor refuses options of srun without --launch slurm. If the switch were removed, it would not refuse."""
    assert main(["doctor", "--", switch]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--foo", "-x", "--"])
def test_a_run_folder_whose_name_begins_with_dashes(name: str, tmp_path: Path) -> None:
    """Ranks get the folder as an argument."""
    quick = ["--num-samples=640", "--global-batch-size=64", "--epochs=1", "--max-steps=2", "--processes=1", "--track"]
    answer = paceline("train", "synthetic-mlp", *quick, f"--output-dir={name}", cwd=tmp_path)
    assert answer.code == 0, answer
    assert (tmp_path / name / "results.json").is_file()


def test_the_text_of_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "one")
    assert main(["runs", "note", "one", "needs", "--trust-code", "and", "--debug"]) == 0
    assert "needs --trust-code and --debug" in (folder.path / "notes.json").read_text()
