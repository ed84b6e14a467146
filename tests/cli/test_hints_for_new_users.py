"""First commands of new users: every mistake gives a hint that can be pasted, and a note names each decision."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from harness.made_runs import add_checkpoints, make_run
from paceline.cli.main import main
from paceline.data.picture_folder import find_pictures
from paceline.data.registry import check_data_config
from paceline.errors import DataError, UserError
from paceline.launch.request import explain_fewer_ranks, explain_lost_state, explain_unused_data
from paceline.models.external import has_random_operations
from paceline.runs.folder import require_run_folder
from paceline.settings.load import load_config
from paceline.settings.rules import check_config
from paceline.settings.schema import DataConfig

STAMPS = ("20260101-000000", "20260102-000000")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def screen(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(list(arguments)) == code
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "status", "logs", "cancel", "checkpoints"])
def test_a_missing_run_names_the_newest(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "paceline train" in screen(capsys, verb)
    make_run(Path("runs/old"), age_s=100)
    make_run(Path("runs/new"))
    assert f"paceline {verb} runs/new" in screen(capsys, verb)


@pytest.mark.parametrize(
    ("name", "meant"), [("shapes-cm", f"shapes-cnn-{STAMPS[1]}"), ("my-rnu", "my-run"), ("nothing-like-it", "")]
)
def test_misspelt_names_of_runs(name: str, meant: str) -> None:
    for run in (*(f"shapes-cnn-{stamp}" for stamp in STAMPS), "my-run"):
        make_run(Path("runs") / run)
    with pytest.raises(UserError) as caught:
        require_run_folder(Path(name))
    assert caught.value.hint is not None
    assert (f"runs/{meant}" in caught.value.hint) == bool(meant)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        *(("--learning-rate=1", "--base-lr"), ("--lr=1", "--base-lr"), ("--wd=1", "--weight-decay")),
        *(("--batch-size=1", "--global-batch-size"), ("--model=x", "--model-name"), ("-j", "--num-workers")),
        *(("--max-epochs=1", "--epochs"), ("--gpus=1", "--processes"), ("--imgsz=1", "--image-size")),
    ],
)
def test_names_of_other_trainers(flag: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("shapes-cnn", [flag])
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"{meant}: ")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["resume", "new"], "paceline train runs/new/config.yaml --resume auto"),
        (["resume"], "paceline train RUN/config.yaml --resume auto"),
        (["train", "runs/new"], "paceline train runs/new/config.yaml --resume auto"),
        (["runs", "taag", "new", "x"], "paceline runs tag new x"),
        (["eval", "new"], "paceline evaluate"),
        (["predict", "new", "pictures"], "paceline predict new pictures/*.png"),
    ],
)
def test_commands_with_another_name_are_suggested(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(Path("runs/new"))
    (Path("runs/new") / "config.yaml").touch()
    Path("pictures").mkdir()
    (Path("pictures") / "a.png").touch()
    assert meant in screen(capsys, *words)


def test_a_search_without_a_match_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/new"))
    assert screen(capsys, "runs", "cifar10", "vgg", code=0) == ""


def test_a_run_without_a_checkpoint_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/new"))
    (Path("runs/new") / "config.yaml").touch()
    assert "paceline train runs/new/config.yaml" in screen(capsys, "evaluate", "new", code=4)


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        (["--policy-ops=3"], True),
        (["--policy-ops=3", "--policy=randaugment"], False),
        (["--crop-scale=0.5"], True),
        (["--cutmix-share=0.5", "--mixup-alpha=0.2"], True),
        (["--cutmix-share=0.5", "--mixup-alpha=0.2", "--cutmix-alpha=1"], False),
    ],
)
def test_flags_without_effect(flags: list[str], is_refused: bool) -> None:
    loaded = load_config("shapes-cnn", flags)
    if is_refused:
        with pytest.raises(UserError):
            check_config(loaded)
    else:
        check_config(loaded)


def test_fewer_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.request.usable_cores", lambda: 4)
    monkeypatch.setattr("paceline.launch.request.count_gpus", lambda parallel: 0)
    note = explain_fewer_ranks(load_config("shapes-cnn", ["--global-batch-size=255"]))
    assert note is not None
    assert "3 ranks for 4 cores" in note
    assert "--global-batch-size 252 or 256" in note
    for flags in (["--global-batch-size=256"], ["--global-batch-size=255", "--processes=1"]):
        assert explain_fewer_ranks(load_config("shapes-cnn", flags)) is None


def test_a_data_folder_that_is_not_used() -> None:
    assert explain_unused_data(load_config("shapes-cnn", ["--data-dir=pictures"])) is not None
    for recipe, flags in (("shapes-cnn", []), ("cifar10-cnn", ["--data-dir=data"])):
        assert explain_unused_data(load_config(recipe, flags)) is None


def test_the_data_of_a_moved_run() -> None:
    with pytest.raises(UserError) as caught:
        check_data_config(DataConfig(dataset="folder", data_dir="nowhere"))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("--data-dir ")


def test_python_instead_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("net.py").write_text("def build():\n    pass\n")
    assert "--model-name net.py:FUNCTION" in screen(capsys, "train", "net.py")


@pytest.mark.parametrize(("below", "hint"), [((), "beside cats"), (("a", "b"), "--data-dir")])
def test_one_class_folder(below: tuple[str, ...], hint: str, folder: Path) -> None:
    for name in below or (".",):
        (folder / "data" / "cats" / name).mkdir(parents=True, exist_ok=True)
        (folder / "data" / "cats" / name / "1.png").touch()
    with pytest.raises(DataError) as caught:
        find_pictures(folder / "data")
    assert caught.value.hint is not None
    assert hint in caught.value.hint


class Functional(nn.Module):
    def forward(self, x: object) -> object:
        return nn.functional.dropout(x, 0.5, self.training)  # type: ignore[arg-type]


class Plain(nn.Module):
    def forward(self, x: object) -> object:
        return x


@pytest.mark.parametrize(
    ("model", "is_random"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Dropout(0.0)), False),
        (nn.Sequential(Functional()), True),
        (Plain(), False),
    ],
)
def test_models_that_draw_random_numbers(model: nn.Module, is_random: bool) -> None:
    assert has_random_operations(model) == is_random


def test_a_resume_with_other_settings_names_the_config_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path("runs") / f"shapes-cnn-{STAMPS[0]}", "stopped")
    add_checkpoints(run, 5)
    run.config.touch()
    answer = screen(capsys, "train", "shapes-cnn", "--resume=auto", code=4)
    assert f"{run.path}/config.yaml --resume auto" in answer
    assert "--init-from" in answer


def test_state_in_global_variables_has_a_note(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("calls = 0\n\n\ndef f(a, b):\n    global calls\n    calls += 1\n\n\ndef g(a, b): ...\n")
    for flags in (["--loss", f"{own}:f"], ["--metrics", f"{own}:g"], ["--model-name", f"{own}:f"]):
        assert f"{own} changes the global variables calls" in str(explain_lost_state(load_config("shapes-cnn", flags)))
    for flags in ([], ["--dataset", f"{own}:f"], ["--loss", f"{tmp_path}/gone.py:f"], ["--loss", "focal"]):
        assert explain_lost_state(load_config("shapes-cnn", flags)) is None
