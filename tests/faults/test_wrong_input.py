"""Fault 17: every mistake in a flag or a recipe is reported on one screen, before torch is imported.

One process runs all of them, because Python takes longer to start than to find a mistake. Each is the complete
command. A few run in a separate process, like a user's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import assert_one_screen, environment, paceline
from paceline.settings.load import load_config
from paceline.settings.rules import check_config

USER, DATA = 2, 3
# Use the fastest of a few: on a busy machine single runs are slow.
TRIES = 3
MOST_CPU_S = 0.6  # without Python's start and imports
MOST_CPU_WITH_START_S = 1.0

FLAGS = {
    "unknown flag": (["--epoch", "3"], ["unknown flag '--epoch'", "--epochs"]),
    "half a flag's name": (["--batch-size", "3"], ["--global-batch-size"]),
    "not a whole number": (
        ["--epochs", "2.5"],
        ["epochs: '2.5'", "flag --epochs", "a whole number, 1 or more"],
    ),
    "not a number": (["--base-lr", "fast"], ["base_lr: 'fast'", "a number"]),
    "nan": (["--base-lr", "nan"], ["base_lr is out of range"]),
    "no number of 64 bits": (["--epochs", "1" + 400 * "0"], ["epochs is out of range", "below 2**63"]),
    "too small": (["--global-batch-size", "0"], ["global_batch_size is out of range", "1 or more"]),
    "negative": (["--momentum", "-0.1"], ["momentum is out of range"]),
    "too large": (["--train-split", "1.1"], ["train_split is out of range", "up to 1"]),
    "unknown choice": (["--strategy", "dpd"], ["strategy: 'dpd'", "single, ddp, fsdp"]),
    "unknown tracker": (["--track", "comet"], ["track: 'comet'", "tensorboard, mlflow, wandb"]),
    "absent tracker": (["--track", "wandb"], ["wandb is not installed", "[wandb]"]),
    "no value": (["--epochs"], ["--epochs needs a value"]),
    "value for a switch": (["--amp=yes"], ["--amp takes no value"]),
    "an extra word": (["--epochs", "2", "more"], ["unexpected argument 'more'"]),
    "indivisible batch": (
        ["--global-batch-size", "250", "--processes", "4"],
        ["250 is not divisible by 4", "248 or 252", "--processes 2 or 5"],
    ),
    "indivisible world": (["--world-size", "3"], ["256 is not divisible by 3", "--processes 2 or 4"]),
    "indivisible lanes": (["--lanes", "3", "--processes", "2"], ["3 lanes", "--lanes 2 or 4"]),
    "one process and many": (["--strategy", "single", "--processes", "2"], ["single runs on one process"]),
    "offload without shards": (["--cpu-offload"], ["cpu_offload needs strategy fsdp"]),
    "wrap without shards": (["--fsdp-wrap", "layers"], ["fsdp_wrap needs strategy fsdp"]),
    "reshard without shards": (["--no-reshard-after-forward"], ["reshard_after_forward needs strategy fsdp"]),
    "buckets with shards": (["--strategy", "fsdp", "--bucket-cap-mb", "5"], ["bucket_cap_mb needs strategy ddp"]),
    "buckets and exact": (["--exact", "--bucket-cap-mb", "5"], ["bucket_cap_mb needs strategy ddp"]),
    "amp on and off": (["--no-amp", "--amp-dtype", "fp16"], ["mixed precision is both"]),
    "warm-up too long": (["--warmup-epochs", "10"], ["warm-up takes the whole run"]),
    "unknown model": (["--model-name", "resnet19"], ["no model of this name", "resnet18"]),
    "model file missing": (["--model-name", "nowhere.py:build"], ["no such file"]),
    "model package missing": (["--model-name", "timm:resnet50d"], ["pip install", "[timm]"]),
    "unknown data set": (["--dataset", "cifar11"], ["no such data set", "cifar10"]),
    "data folder missing": (["--dataset", "folder", "--data-dir", "nowhere"], ["no such folder", "nowhere"]),
    "input size": (["--dataset", "synthetic", "--input-size", "3x"], ["3x"]),
    "nothing to resume": (["--resume", "nowhere"], ["nothing to resume from", "nowhere"]),
    "rehearse a resume": (["--rehearse", "--resume", "auto"], ["rehearsal"]),
    "weights missing": (["--weights", "nowhere.pth"], ["nowhere.pth"]),
}

RECIPES: dict[str, tuple[bytes, list[str]]] = {
    "unknown key": (b"epochs: 2\nepoch: 3\n", ["unknown key 'epoch'", "line 2", "epochs"]),
    "wrong type": (b"epochs: many\n", ["epochs: 'many'", "line 1", "a whole number"]),
    "out of range": (b"\nepochs: 0\n", ["epochs is out of range", "line 2"]),
    "key given twice": (b"epochs: 2\nepochs: 3\n", ["given twice", "line 2", "line 1"]),
    "alias given twice": (b"processes: 2\nworld_size: 2\n", ["given twice"]),
    "no value": (b"epochs:\n", ["epochs needs a value"]),
    "a list": (b"epochs: [1, 2]\n", ["epochs needs a value"]),
    "not a boolean": (b"amp: maybe\n", ["amp: 'maybe'", "true or false"]),
    "tab": (b"epochs: 2\n\tseed: 3\n", ["not valid YAML", "line 2", "tabs"]),
    "broken": (b"epochs: [1\n", ["not valid YAML"]),
    "empty": (b"", ["empty"]),
    "only a comment": (b"# nothing\n", ["empty"]),
    "a list of things": (b"- epochs\n", ["key: value"]),
    "not UTF-8": (b"dataset: \xff\xfe\n", ["not UTF-8"]),
    "control character": (b"dataset: \x00\n", ["not valid YAML"]),
    "a python object": (
        b"epochs: !!python/object/apply:os.system ['touch canary']\n",
        ["epochs needs a value"],
    ),
    "too large": (b"# " + b"x" * 1_100_000, ["larger than"]),
    "too large by far": (b"# " + b"x" * 2_000_000, ["larger than"]),
    "a list within itself": (b"epochs: &a [*a]\n", ["aliases", "line 1"]),
    "another recipe included": (b"include: mine.yaml\nepochs: 2\n", ["unknown key 'include'", "line 1"]),
    "a number that is no whole one": (b"epochs: 3e-4\n", ["epochs: '3e-4'", "a whole number"]),
    "a list that doubles": (
        b"".join(b"x%d: &x%d [%s]\n" % (n, n, b"*x%d, *x%d" % (n - 1, n - 1) if n else b"1") for n in range(60)),
        ["aliases", "line 1"],
    ),
}

RUN_ALL = """
import contextlib, io, json, os, sys, time
from paceline.cli.main import main
answers = {}
for name, (folder, arguments) in json.loads(sys.stdin.read()).items():
    os.chdir(folder)
    cpu_s = []
    for _ in range(int(sys.argv[1])):
        said, started = io.StringIO(), time.process_time()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = main(arguments)
        cpu_s.append(time.process_time() - started)
    answers[name] = [code, said.getvalue(), min(cpu_s), "torch" in sys.modules]
print(json.dumps(answers))
"""


def run_all(requests: dict[str, tuple[str, list[str]]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(TRIES)],
        input=json.dumps(requests),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For every mistake: exit code, output, CPU seconds, whether torch was imported, and new files."""
    folders, requests = {}, {}
    for number, (kind, name) in enumerate([("flag", n) for n in FLAGS] + [("recipe", n) for n in RECIPES]):
        folders[kind, name] = folder = tmp_path_factory.mktemp(f"mistake-{number}")
        if kind == "flag":
            requests[f"{kind} {name}"] = (str(folder), ["train", "shapes-cnn", *FLAGS[name][0]])
        else:
            (folder / "mine.yaml").write_bytes(RECIPES[name][0])
            requests[f"{kind} {name}"] = (str(folder), ["train", "mine.yaml"])
    found = run_all(requests)
    return {
        f"{kind} {name}": (*found[f"{kind} {name}"], [path.name for path in folder.iterdir()])
        for (kind, name), folder in folders.items()
    }


def test_there_are_at_least_thirty_mistakes() -> None:
    assert len(FLAGS) + len(RECIPES) >= 50


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_flags(case: str, answers: dict[str, Any]) -> None:
    code, said, cpu_s, has_torch, left = answers[f"flag {case}"]
    assert code == (DATA if case == "weights missing" else USER), said
    assert_one_screen(said, *FLAGS[case][1])
    assert left == []  # no process was started, no file was written
    assert cpu_s < MOST_CPU_S
    assert not has_torch


@pytest.mark.parametrize("case", RECIPES)
def test_wrong_recipes(case: str, answers: dict[str, Any]) -> None:
    code, said, cpu_s, has_torch, left = answers[f"recipe {case}"]
    assert code == USER, said
    assert_one_screen(said, "mine.yaml", *RECIPES[case][1])
    assert left == ["mine.yaml"]
    assert cpu_s < MOST_CPU_S
    assert not has_torch


@pytest.mark.parametrize("case", ["unknown flag", "indivisible batch", "unknown data set"])
def test_wrong_flags_in_a_separate_process(case: str, tmp_path: Path) -> None:
    flags, parts = FLAGS[case]
    answers = [paceline("train", "shapes-cnn", *flags, cwd=tmp_path) for _ in range(TRIES)]
    for answer in answers:
        assert answer.code == USER
        assert_one_screen(answer.err, *parts)
    assert min(answer.cpu_s for answer in answers) < MOST_CPU_WITH_START_S


def test_a_number_that_yaml_reads_as_text_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base_lr: 3e-4\n")
    loaded = load_config(str(tmp_path / "mine.yaml"), [])
    check_config(loaded)
    assert loaded.config.optim.base_lr == 3e-4
