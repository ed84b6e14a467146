"""The header and the summary of a run: what differs from the default, and commands that work."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from harness.ranks import make_world
from harness.runs import QUICK, quick_config
from paceline.cli.evaluate import Export
from paceline.data.dataset import DatasetInfo
from paceline.data.reference import check_reference
from paceline.errors import UserError
from paceline.launch.request import read_request
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.settings.command_line import parse_command
from paceline.settings.load import load_config
from paceline.settings.rules import check_config
from paceline.training.header import describe_objective
from paceline.training.loop import train
from paceline.training.results import describe_summary


@pytest.mark.parametrize(("shape", "takes_pictures"), [((3, 8, 8), True), ((3, 8, 9), False), ((20,), False)])
def test_the_named_commands_work_for_the_run(tmp_path: Path, shape: tuple[int, ...], takes_pictures: bool) -> None:
    """`export` has its format. `predict` is named only for data of pictures."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    results = train(quick_config("--max-steps=1"), make_world(0, 1), RunPlace(folder.path, None))
    mean = (0.5,) * 3 if len(shape) == 3 else ()
    info = DatasetInfo("made", 8, 8, ("a", "b"), shape, mean, mean)
    lines = describe_summary(replace(results, plan=replace(results.plan, info=info)), folder)
    commands = [shlex.split(line.rpartition("  ")[0]) for line in lines if line.startswith("  paceline ")]
    named = {words[1]: words[2:] for words in commands}
    assert ("predict" in named) == takes_pictures
    assert parse_command(named["export"], Export, "export").run == str(tmp_path / "run")


def test_a_finished_run_that_is_started_again_keeps_its_speed(tmp_path: Path) -> None:
    folder, world = RunFolder(tmp_path / "run"), make_world(0, 1)
    folder.create()
    train(quick_config("--max-steps=2"), world, RunPlace(folder.path, None))
    before = json.loads(folder.results.read_text())
    again = train(quick_config("--max-steps=2"), world, RunPlace(folder.path, folder.path))
    assert json.loads(folder.results.read_text()) == before
    assert before["samples_per_second"] > 0
    assert not any("samples/s" in line for line in describe_summary(again, folder))
    train(quick_config("--max-steps=3"), world, RunPlace(folder.path, folder.path))
    longer = json.loads(folder.results.read_text())
    assert longer["samples_per_second"] not in (0, before["samples_per_second"])


def test_a_warm_up_as_long_as_the_run_names_its_flags() -> None:
    """The values come from different flags. The message has both."""
    loaded = load_config("shapes-cnn", [*QUICK, "--epochs=1", "--warmup-epochs=1"])
    with pytest.raises(UserError) as caught:
        check_config(loaded)
    for flag in ("--warmup-epochs", "--epochs"):
        assert flag in str(caught.value.got)
    hint = str(caught.value.hint).partition(",")[0].split()
    assert quick_config("--epochs=1", *hint).optim.warmup_epochs < 1


def test_metrics_with_commas_are_refused_with_the_right_syntax(tmp_path: Path) -> None:
    """Spaces separate metrics. A comma would be part of a file name."""
    (tmp_path / "own.py").write_text("def one(a, b): ...\n\n\ndef two(a, b): ...\n")
    own = f"{tmp_path}/own.py"
    assert quick_config("--metrics", f"{own}:one", f"{own}:two").train.metrics == (f"{own}:one", f"{own}:two")
    with pytest.raises(UserError) as caught:
        check_reference(f"{own}:one,{own}:two", where="--metrics")
    assert "spaces" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), ""),
        (("--loss", "focal"), "loss focal (gamma 2), best by accuracy"),
        (("--best-by", "f1"), "best by f1"),
        (("--class-weights", "balanced"), "class weights balanced, best by accuracy"),
        (
            ("--class-weights", "1,1,1,1,1,1,2,1,1,1", "--sampling", "balanced", "--epoch-samples", "1000"),
            "class weights 1 1 1 1 1 1 ..., balanced sampling (1,000 samples an epoch), best by accuracy",
        ),
        (("--loss", "bce", "--bce-threshold", "0.2"), "loss bce (targets above 0.2 are 1), best by accuracy"),
    ],
)
def test_the_header_names_what_differs_from_plain_classification(flags: tuple[str, ...], line: str) -> None:
    assert describe_objective(read_request("shapes-cnn", list(flags)).config) == line


def test_the_header_names_the_teacher() -> None:
    config = read_request("shapes-cnn", []).config
    taught = replace(config, objective=replace(config.objective, teacher="runs/old", distill_temperature=2.0))
    assert describe_objective(taught) == "teacher runs/old (soft, share 0.5, temperature 2)"
