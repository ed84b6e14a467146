"""Runnable's parameters: presets, overrides, the settings that they become, and wrong ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from harness.cli import command
from harness.runnable_pipelines import EXAMPLE, TINY, copy_example
from paceline.errors import UserError
from paceline.integrations.runnable.parameters import fit_world, make_request, name_parameters, read_parameters
from paceline.integrations.runnable.start import run_pipeline
from paceline.runtime.resources import usable_cores
from paceline.settings.load import LoadedConfig

pytestmark = pytest.mark.flows
NEEDS = ("runnable",)


def load(file: Path, **environment: str) -> LoadedConfig:
    return make_request(read_parameters(str(file), environment))[1]


# --- Their meaning


def numbers_of(loaded: LoadedConfig) -> tuple[object, ...]:
    config = loaded.config
    rate = config.optim.base_lr * config.train.global_batch_size / 256
    world = int(config.parallel.processes)
    batch = config.train.global_batch_size // world
    return (world, config.train.epochs, batch, rate, config.model.hidden_size, config.data.num_samples)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("parameters.yaml", (4, 10, 64, 0.001, 256, 20_000)),
        ("presets/high-performance.yaml", (8, 10, 32, 0.001, 512, 50_000)),
        ("presets/memory-efficient.yaml", (2, 10, 128, 0.001, 128, 20_000)),
        ("presets/single-process.yaml", (1, 10, 256, 0.001, 256, 20_000)),
        ("presets/fast-experimentation.yaml", (2, 5, 64, 0.001, 128, 5_000)),
    ],
)
def test_presets(name: str, expected: tuple[object, ...]) -> None:
    loaded = load(EXAMPLE / name)
    assert numbers_of(loaded) == expected
    data = loaded.config.data
    assert (loaded.recipe_name, data.input_size, data.num_classes, data.train_split) == (
        "synthetic-mlp",
        "784",
        10,
        0.8,
    )


def test_every_preset_is_tested() -> None:
    assert len(list((EXAMPLE / "presets").iterdir())) == 4


def test_the_environment_has_priority_and_may_set_any_setting_of_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("recipe: shapes-cnn\nepochs: 3\n")
    names = {
        "RUNNABLE_PRM_EPOCHS": "7",
        "RUNNABLE_PRM_OPTIMIZER": "adamw",
        "RUNNABLE_PRM_FLIP": "false",
        "RUNNABLE_PRM_STOP_SIGNALS": '["SIGTERM", "SIGUSR1"]',
        "EPOCHS": "9",
    }
    loaded = load(file, **names)
    config = loaded.config
    assert (loaded.recipe_name, config.train.epochs, config.optim.optimizer) == ("shapes-cnn", 7, "adamw")
    assert (config.data.flip, config.guard.stop_signals) == (False, ("SIGTERM", "SIGUSR1"))
    assert config.optim.base_lr == 0.1  # from the recipe


def test_a_step_reads_the_values_of_the_file(tmp_path: Path) -> None:
    """Runnable passes numbers, booleans and lists. The check before it reads text. Both give the same settings."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    from_file = make_request(read_parameters(str(tmp_path / "tiny.yaml"), {}))[0]
    from_runnable = make_request(name_parameters(yaml.safe_load(TINY)))[0]
    assert from_file == from_runnable
    assert {"--exact", "--lanes=2", "--global-batch-size=32", "--base-lr=0.032"} <= set(from_file.flags)


def test_parameters_that_argo_adds_for_runnable_are_ignored() -> None:
    added = {"run_id": "x", "retry_run_id": "", "retry_indicator": "", "log_level": "WARNING"}
    assert make_request(name_parameters({"epochs": 1, **added}))[0].flags == ["--epochs=1"]


def test_world_size_is_limited_to_the_cores_with_a_warning_and_the_global_batch_stays() -> None:
    loaded = make_request(name_parameters({"world_size": 4, "batch_size": 6, "device": "cpu"}))[1]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert usable_cores() == 1
        flags, warning = fit_world(loaded)
    finally:
        os.sched_setaffinity(0, cores)
    assert flags == ["--processes", "1"]
    assert warning == (
        "warning: world_size 4 is more than this machine allows (1 core): "
        "1 rank with 24 samples each; the global batch stays 24"
    )
    assert fit_world(make_request(name_parameters({"world_size": 1, "device": "cpu"}))[1]) == ([], None)


# --- Wrong parameters


WRONG = {
    "epoch: 3": ("unknown key 'epoch'", "perhaps you meant epochs"),
    "epochs: ten": ("epochs: 'ten' is not valid", "line 1"),
    "epochs: 0": ("epochs is out of range", "1 or more"),
    "recipe: []": ("recipe: '' is not valid", "text"),
    "epochs:": ("epochs needs a value", "nothing"),
    "epochs: {a: 1}": ("epochs needs a value", "a mapping"),
    "epochs: [1, 2]": ("epochs: '1 2' is not valid", "a whole number"),
    "epochs: 1\nepochs: 2": ("epochs is given twice", "line 2"),
    "batch_size: 32": ("batch_size is for one process", "give world_size"),
    "world_size: 2:4\nbatch_size: 32": ("batch_size is for one process", "world_size 2:4"),
    "world_size: []\nbatch_size: 32": ("batch_size is for one process", "world_size without a value"),
    "world_size: []": ("processes: '' is not valid", "line 1"),
    "world_size: 2\nbatch_size: 32\nglobal_batch_size: 64": ("global_batch_size is given twice", "leave one out"),
    "world_size: 2\nprocesses: 2": ("processes is given twice", "leave one out"),
    "world_size: 2\nbatch_size: 0": ("batch_size is out of range", "1 or more"),
    "world_size: two": ("processes: 'two' is not valid", "line 1"),
    "world_size: 3\nglobal_batch_size: 32": ("global_batch_size 32 is not divisible by 3", "line 2"),
    "world_size: 3\nexact: true\nbatch_size: 4": ("exact needs a power of two", "line 1"),
    "world_size: 2\nstrategy: single": ("strategy single runs on one process", "line 2"),
    "learning_rate: -1": ("learning_rate is out of range", "greater than 0"),
    "learning_rate: .nan": ("learning_rate: '.nan' is not valid", "greater than 0"),
    "learning_rate: 0.1\nbase_lr: 0.1": ("base_lr is given twice", "leave one out"),
    "train_split: 1.1": ("train_split is out of range", "up to 1"),
    "num_classes: 1": ("num_classes is out of range", "from 2"),
    "exact: maybe": ("exact: 'maybe' is not valid", "true or false"),
    "recipe: synthetic-mpl": ("there is no recipe 'synthetic-mpl'", "paceline train synthetic-mlp"),
    "dataset: cifar11": ("there is no such data set", "cifar10"),
    "model_name: resnet19": ("there is no model of this name", "resnet18"),
    "output_dir: here": ("output_dir is not a parameter", "RUNNABLE_RUN_ID"),
    "resume: auto": ("resume is not a parameter", "RUNNABLE_RETRY_RUN_ID"),
    "inject: kil rank=1 step=5": ("kil", "line 1"),
    "- epochs": ("must be `key: value` lines", "own.yaml"),
    "": ("is empty", "own.yaml"),
    "epochs: 'ten": ("not valid YAML", "line 1"),
}


def start(home: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> int:
    """Like pipeline.py. The pipeline itself must not be reached."""
    monkeypatch.chdir(home)
    for name in [name for name in os.environ if name.startswith("RUNNABLE_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = str(home / "own.yaml")

    def reached() -> None:
        pytest.fail("the pipeline was started")

    return run_pipeline(reached, script=str(home / "pipeline.py"), parameters_file=file)


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_parameter_gives_one_screen(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert start(tmp_path, monkeypatch) == 2
    screen = capsys.readouterr().err
    assert screen.startswith("error: ")
    assert len(screen.splitlines()) <= 6
    for words in WRONG[text]:
        assert words in screen
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RUNNABLE_PRM_EPOCHS": "-3"}, "environment variable RUNNABLE_PRM_EPOCHS"),
        ({"RUNNABLE_PRM_EPOCS": "3"}, "environment variable RUNNABLE_PRM_EPOCS"),
        ({"RUNNABLE_PARAMETERS_FILE": "nowhere.yaml"}, "there is no such file of parameters"),
        ({"RUNNABLE_CONFIGURATION_FILE": "nowhere.yaml"}, "there is no such configuration file"),
        ({"RUNNABLE_RUN_ID": "../up"}, "a run id is the name of a folder"),
        ({"RUNNABLE_RETRY_RUN_ID": "a b"}, "environment variable RUNNABLE_RETRY_RUN_ID"),
    ],
)
def test_a_wrong_variable_gives_one_screen(
    variables: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own.yaml").write_text("epochs: 1\n")
    assert start(tmp_path, monkeypatch, **variables) == 2
    assert words in capsys.readouterr().err


def test_a_run_id_is_not_used_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text("epochs: 1\n")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("epochs: 1\n")
    assert start(tmp_path, monkeypatch, RUNNABLE_RUN_ID="first") == 2
    assert "RUNNABLE_RETRY_RUN_ID=first continues it" in capsys.readouterr().err


def test_a_pipeline_outside_the_working_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_pipeline(lambda: None, script=str(EXAMPLE / "pipeline.py"), parameters_file="x") == 2
    assert "below the folder it is started in" in capsys.readouterr().err


def test_a_refused_script_leaves_no_file_and_ends_before_runnable_starts(tmp_path: Path) -> None:
    home = copy_example(tmp_path)
    before = {path.name for path in home.iterdir()}
    answer = command(sys.executable, "pipeline.py", cwd=home, RUNNABLE_PRM_BATCH_SIZE="many")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.splitlines() == [
        "error: batch_size: 'many' is not valid",
        "  where:   environment variable RUNNABLE_PRM_BATCH_SIZE",
        "  allowed: a whole number, 1 or more",
    ]
    assert {path.name for path in home.iterdir()} == before


def test_an_unknown_run_cannot_be_retried(tmp_path: Path) -> None:
    home = copy_example(tmp_path)
    answer = command(sys.executable, "pipeline.py", cwd=home, RUNNABLE_RETRY_RUN_ID="never", PYTHONWARNINGS="default")
    assert answer.code == 2
    assert "error: this run cannot be retried" in answer.err
    assert "Traceback" not in answer.err


def test_errors_name_the_parameter_not_a_flag() -> None:
    with pytest.raises(UserError) as caught:
        make_request(name_parameters({"world_size": 2, "batch_size": 16, "accumulate": 3}))
    assert caught.value.where == "parameter batch_size (times world_size 2)"
