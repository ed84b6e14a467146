"""`paceline evaluate` of a run, of one of its checkpoints, and of a checkpoint folder without its run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import paceline
from harness.forged import rewrite_state
from harness.runs import read_results
from paceline.checkpoints.format import step_folders
from paceline.cli.command import run_verb
from paceline.errors import CheckpointError, UserError
from paceline.metrics.recorder import read_rows
from paceline.runs.trust import TRUST_FLAG, trusting_code
from paceline.training.inject import flip_a_bit

OWN_LOSS = """\
from torch.nn.functional import cross_entropy


def own(logits, labels):
    return cross_entropy(logits, labels)
"""
FLAGS = ["--num-samples=400", "--global-batch-size=40", "--epochs=3", "--hidden-size=8", "--keep-last=3", "--track"]
STEPS = [8, 16, 24]
Evaluate = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs on two ranks, with all its checkpoints, which uses a user's function."""
    home = tmp_path_factory.mktemp("evaluate")
    (home / "own.py").write_text(OWN_LOSS)
    flags = [*FLAGS, "--loss=own.py:own", "--processes=2", "--output-dir=run"]
    answer = paceline("train", "synthetic-mlp", *flags, cwd=home)
    assert answer.code == 0, answer
    assert sorted(int(path.name.removeprefix("step-")) for path in step_folders(home / "run" / "checkpoints")) == STEPS
    return home


@pytest.fixture
def evaluate(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Run the command in this process. Returns its output, and the files that it wrote into the run folder."""
    monkeypatch.chdir(home)
    written = home / "run" / "evaluation.json"

    def run(*arguments: str) -> tuple[str, dict[str, Any]]:
        written.unlink(missing_ok=True)
        given = [argument for argument in arguments if argument != TRUST_FLAG]  # every command accepts this flag
        with trusting_code(TRUST_FLAG in arguments):
            assert run_verb("evaluate", [*given, "--device=cpu"]) == 0
        return capsys.readouterr().out, json.loads(written.read_text()) if written.exists() else {}

    return run


def test_without_a_name_the_best_checkpoint_is_evaluated(home: Path) -> None:
    """The run's own test accuracy, from the best checkpoint. Its step and folder are named."""
    answer = paceline("evaluate", "run", "--checkpoint", "best", "--device=cpu", cwd=home)
    assert answer.code == 0, answer
    found, results = json.loads((home / "run" / "evaluation.json").read_text()), read_results(home / "run")
    assert found["test_accuracy"] == results["test_accuracy"]
    best = 8 * int(str(results["best_epoch"]))
    assert (found["step"], found["checkpoint"]) == (best, f"step-{best:08}")


def test_a_step_the_latest_or_a_folder_can_be_named(home: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    """By step, as a folder in its run, and as a folder copied elsewhere: the same result, bit for bit."""
    assert evaluate("run", "--checkpoint=best")[1] == evaluate("run")[1]
    for name, step in [("8", 8), ("latest", 24)]:
        _, by_name = evaluate("run", f"--checkpoint={name}")
        assert by_name["step"] == step
        assert evaluate(f"run/checkpoints/step-{step:08}")[1] == by_name
        alone = tmp_path / f"alone-{step}"
        shutil.copytree(home / "run" / "checkpoints" / f"step-{step:08}", alone)
        before = sorted(alone.rglob("*"))
        out, written = evaluate(str(alone), "--trust-code")
        assert written == {}
        assert sorted(alone.rglob("*")) == before
        assert out.splitlines()[1] == by_line(by_name)
    assert evaluate("run/checkpoints/latest")[1]["step"] == 24


def by_line(found: dict[str, Any]) -> str:
    accuracy, loss, samples = (found[name] for name in ("test_accuracy", "test_loss", "samples"))
    return f"test accuracy {accuracy:.2%}, loss {loss:.4f}, {samples:,} samples"


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["run", "--checkpoint", "9"], "best, latest, 8, 16, 24"),
        (["run", "--checkpoint", "worst"], "best, latest, 8, 16, 24"),
        (["run", "--checkpoint"], "best, latest, or a step"),
        (["run/checkpoints/step-00000008", "--checkpoint", "8"], "one checkpoint already"),
        (["run/checkpoints"], "not a run folder"),
    ],
)
def test_a_checkpoint_that_does_not_exist_is_a_user_error(
    arguments: list[str], allowed: str, evaluate: Evaluate
) -> None:
    """Exit code 2, with the existing checkpoints."""
    with pytest.raises(UserError) as raised:
        evaluate(*arguments)
    assert allowed in raised.value.screen()


def test_code_of_a_checkpoint_of_another_user_is_not_executed(
    home: Path, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SECURITY.md: a folder from another user has functions. Without --trust-code they are not executed."""
    alone = shutil.copytree(home / "run" / "checkpoints" / "step-00000008", tmp_path / "alone")
    marked = tmp_path / "executed"

    def forge(values: dict[str, Any]) -> None:
        (module,) = values["record"]["sources"]["modules"].values()
        module["text"] = f"open({str(marked)!r}, 'w').close()\n{module['text']}"

    rewrite_state(alone, forge)
    monkeypatch.setenv("PACELINE_STATE", str(tmp_path / "state"))
    with pytest.raises(UserError) as raised:
        evaluate(str(alone))
    assert "--trust-code" in raised.value.screen()
    assert not marked.exists()
    evaluate(str(alone), "--trust-code")
    assert marked.exists()


def test_a_damaged_checkpoint_without_its_run_is_refused(home: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    """Exit code 4: every bit is verified before it is used."""
    shutil.copytree(home / "run" / "checkpoints" / "step-00000008", tmp_path / "checkpoints" / "step-00000008")
    flip_a_bit(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError):
        evaluate(str(tmp_path / "checkpoints" / "step-00000008"), "--trust-code")


def test_each_rank_records_its_own_part_of_an_epoch(home: Path) -> None:
    """The ranks' samples, losses and correct predictions add up to the epoch's. Each rank's log has a line."""
    rows = [row for row in read_rows(home / "run" / "metrics.jsonl") if row.get("phase") == "train"]
    assert len(rows) == 3
    for row in rows:
        ranks = row["ranks"]
        assert ranks["samples"] == [160, 160]
        for name in ("loss", "accuracy"):
            assert sum(ranks[name]) / 2 == pytest.approx(row[name], rel=1e-12)  # sums in another order
        assert ranks["loss"][0] != ranks["loss"][1]
    for rank in (0, 1):
        log = (home / "run" / "logs" / f"rank-{rank}.log").read_text()
        for row in rows:
            line = f"epoch {row['epoch']}: loss {row['ranks']['loss'][rank]:.4f}, accuracy"
            assert log.count(line) == 1
