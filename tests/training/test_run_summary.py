"""The summary of a run names commands that work."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from harness.ranks import make_world
from harness.runs import QUICK, quick_config
from paceline.cli.export import Export
from paceline.data.dataset import DatasetInfo
from paceline.data.reference import check_reference
from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.settings.command_line import parse_command
from paceline.settings.load import load_config
from paceline.settings.rules import check_config
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
