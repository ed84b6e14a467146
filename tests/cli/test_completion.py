"""Shell completion: the suggested words. The scripts in real shells: tests/cli/test_shells.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli import command, paceline
from harness.made_runs import make_run
from paceline.cli.completion import complete
from paceline.cli.main import VERBS, main
from paceline.runs.notes import Notes, write_notes
from paceline.settings.recipe_file import shipped_recipes
from paceline.settings.schema import field_table

RECIPES = list(shipped_recipes())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, one with a tag."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "one")
    write_notes(make_run(tmp_path / "runs" / "two words").path, Notes(("baseline",)))
    (tmp_path / "runs" / "not a run").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["tr"], ["train"]),
        ([""], [*VERBS, "--help", "--version"]),
        (["train", ""], RECIPES),
        (["train", "shapes-cnn", ""], []),
        (["train", "cifar10-c"], ["cifar10-cnn"]),
        (["train", "--global-b"], ["--global-batch-size"]),
        (["train", "shapes-cnn", "--strategy", ""], ["auto", "single", "ddp", "fsdp", "hsdp"]),
        (["train", "--strategy", "=", "dd"], ["ddp"]),
        (["train", "--strategy", "="], ["auto", "single", "ddp", "fsdp", "hsdp"]),
        (["train", "--resume", ""], ["auto", "runs/two words", "runs/one"]),
        (["train", "--qui"], ["--quiet"]),
        (["train", "--no-am"], ["--no-amp"]),
        (["status", "runs/o"], ["runs/one"]),
        (["status", "runs/one", ""], []),
        (["compare", "runs/one", "runs/t"], ["runs/two words"]),
        (["predict", "runs/one", ""], []),
        (["submit", ""], ["slurm", "kubernetes"]),
        (["submit", "slurm", "shapes"], ["shapes-cnn"]),
        (["submit", "slurm", "shapes-cnn", "--part"], ["--partition"]),
        (["logs", "runs/one", "--f"], ["--follow"]),
        (["runs", ""], ["tag", "untag", "note"]),
        (["runs", "tag", ""], ["runs/two words", "runs/one"]),
        (["runs", "tag", "runs/one", ""], ["baseline"]),
        (["runs", "--status", "f"], ["finished", "failed"]),
        (["clean", "--ol"], ["--older-than"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["nonsense", ""], []),
        (["nonsense", "--"], []),
    ],
)
def test_words(words: list[str], wanted: list[str], home: Path) -> None:
    assert complete(words) == wanted


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_flags_and_subjects_without_an_error(verb: str, home: Path) -> None:
    assert "--help" in complete([verb, "--"])
    complete([verb, ""])


def test_every_flag_of_the_schema_completes(home: Path) -> None:
    assert {spec.flag for spec in field_table().values()} <= set(complete(["train", "--"]))


def test_completion_imports_no_torch_and_prints_no_errors(home: Path) -> None:
    ask = "main(['completion', '--words', 'train', '--'])"
    probe = f"import sys; from paceline.cli.main import main; {ask}; print(*sys.modules)"
    assert "torch" not in command(sys.executable, "-c", probe, cwd=home).out.splitlines()[-1].split()
    for words in ([], ["", ""], ["--words"], ["train", "--resume", "=", "="]):
        answer = paceline("completion", "--words", *words, cwd=home)
        assert (answer.code, answer.err) == (0, ""), words


def test_which_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
