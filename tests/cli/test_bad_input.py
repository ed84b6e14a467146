"""Every mistake gets one screen, the right exit code and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from harness.cli import Answer, paceline

USER, DATA = 2, 3
MOST_LINES = 12


def assert_one_screen(answer: Answer, code: int, *parts: str) -> None:
    assert answer.code == code, answer
    assert "Traceback" not in answer.err + answer.out
    screen = answer.err.strip()
    assert screen.startswith("error: "), answer
    assert screen.count("error: ") == 1
    assert len(screen.splitlines()) <= MOST_LINES, screen
    for part in parts:
        assert part in screen, screen


FLAGS = {
    "unknown flag": (["--epoch", "3"], ["unknown flag '--epoch'", "--epochs"]),
    "half a flag's name": (["--batch-size", "3"], ["--global-batch-size"]),
    "not a whole number": (
        ["--epochs", "2.5"],
        ["epochs: '2.5'", "flag --epochs", "a whole number, 1 or more"],
    ),
    "not a number": (["--base-lr", "fast"], ["base_lr: 'fast'", "a number"]),
    "nan": (["--base-lr", "nan"], ["base_lr is out of range"]),
    "too small": (["--global-batch-size", "0"], ["global_batch_size is out of range", "1 or more"]),
    "negative": (["--momentum", "-0.1"], ["momentum is out of range"]),
    "too large": (["--train-split", "1.0"], ["train_split is out of range", "less than 1"]),
    "unknown choice": (["--strategy", "dpd"], ["strategy: 'dpd'", "single, ddp, fsdp"]),
    "unknown tracker": (["--track", "comet"], ["track: 'comet'", "tensorboard, mlflow, wandb"]),
    "absent tracker": (["--track", "wandb"], ["wandb is not installed", "paceline[wandb]"]),
    "no value": (["--epochs"], ["--epochs needs a value"]),
    "value for a switch": (["--amp=yes"], ["--amp takes no value"]),
    "stray word": (["--epochs", "2", "more"], ["unexpected argument 'more'"]),
    "indivisible batch": (
        ["--global-batch-size", "250", "--processes", "4"],
        ["250 is not divisible by 4", "248 or 252", "--processes 2 or 5"],
    ),
    "indivisible world": (["--world-size", "3"], ["256 is not divisible by 3", "--processes 2 or 4"]),
    "indivisible lanes": (["--lanes", "3", "--processes", "2"], ["3 lanes", "--lanes 2 or 4"]),
    "one process and many": (["--strategy", "single", "--processes", "2"], ["single runs on one process"]),
    "offload without shards": (["--cpu-offload"], ["cpu_offload needs strategy fsdp"]),
    "amp on and off": (["--no-amp", "--amp-dtype", "fp16"], ["mixed precision is both"]),
    "warm-up too long": (["--warmup-epochs", "10"], ["warm-up takes the whole run"]),
    "unknown model": (["--model-name", "resnet19"], ["no model of this name", "resnet18"]),
    "model file missing": (["--model-name", "nowhere.py:build"], ["no such file"]),
    "model package missing": (["--model-name", "timm:resnet50d"], ["paceline[timm]"]),
    "unknown data set": (["--dataset", "cifar11"], ["no such data set", "cifar10"]),
    "data folder missing": (["--dataset", "folder", "--data-dir", "nowhere"], ["no such folder", "nowhere"]),
    "input size": (["--dataset", "synthetic", "--input-size", "3x"], ["3x"]),
    "nothing to resume": (["--resume", "nowhere"], ["nothing to resume from", "nowhere"]),
    "rehearse a resume": (["--rehearse", "--resume", "auto"], ["rehearsal"]),
    "weights missing": (["--weights", "nowhere.pth"], ["nowhere.pth"]),
}


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_flags(case: str, tmp_path: Path) -> None:
    flags, parts = FLAGS[case]
    code = DATA if case == "weights missing" else USER
    assert_one_screen(paceline("train", "shapes-cnn", *flags, cwd=tmp_path), code, *parts)
    assert list(tmp_path.iterdir()) == []  # nothing was started, nothing is left behind


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
    "too large": (b"# " + b"x" * 1_100_000, ["too large"]),
}


@pytest.mark.parametrize("case", RECIPES)
def test_wrong_recipes(case: str, tmp_path: Path) -> None:
    content, parts = RECIPES[case]
    (tmp_path / "mine.yaml").write_bytes(content)
    assert_one_screen(paceline("train", "mine.yaml", cwd=tmp_path), USER, "mine.yaml", *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_recipe_that_is_not_there(tmp_path: Path) -> None:
    assert_one_screen(paceline("train", "shape-cnn", cwd=tmp_path), USER, "no recipe", "paceline train shapes-cnn")
    assert_one_screen(paceline("train", ".", cwd=tmp_path), USER, "not a folder")
    assert_one_screen(paceline("trian", cwd=tmp_path), USER, "unknown command", "paceline train")


def broken_cifar(folder: Path) -> None:
    (folder / "cifar-10-batches-bin").mkdir()
    for name in [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]:
        with (folder / "cifar-10-batches-bin" / name).open("wb") as file:
            file.truncate(30_730_000 if name != "data_batch_3.bin" else 1_000_000)


def folder_with_a_broken_picture(folder: Path) -> None:
    for label in ("cat", "dog"):
        for half in ("train", "test"):
            (folder / half / label).mkdir(parents=True)
            for number in range(20):
                Image.new("RGB", (40, 40), (number, 0, 0)).save(folder / half / label / f"{number}.png")
    for number in range(20):  # all of one class: whichever batch comes first meets one
        (folder / "train" / "cat" / f"{number}.png").write_bytes(b"\x89PNG not really")


def folder_with_one_class(folder: Path) -> None:
    (folder / "cat").mkdir()
    Image.new("RGB", (40, 40)).save(folder / "cat" / "1.png")


SMALL = ["--model-name", "cnn", "--weights", "none", "--image-size", "32", "--global-batch-size", "8"]
DATASETS: dict[str, tuple[Callable[[Path], None], list[str], list[str]]] = {
    "truncated batch": (broken_cifar, ["cifar10-cnn"], ["data_batch_3.bin", "1,000,000", "30,730,000"]),
    "unreadable picture": (folder_with_a_broken_picture, ["folder-resnet50", *SMALL], ["train/cat", ".png"]),
    "one class": (folder_with_one_class, ["folder-resnet50", *SMALL], ["cat"]),
}


@pytest.mark.parametrize("case", DATASETS)
@pytest.mark.parametrize("processes", ["1", "2"])
def test_broken_data(case: str, processes: str, tmp_path: Path) -> None:
    make, arguments, parts = DATASETS[case]
    data = tmp_path / "data"
    data.mkdir()
    make(data)
    answer = paceline("train", *arguments, "--data-dir", "data", "--processes", processes, "--track", cwd=tmp_path)
    assert_one_screen(answer, DATA, *parts)


def test_data_that_cannot_be_downloaded(tmp_path: Path) -> None:
    # A proxy that refuses every connection stands for a machine without a network.
    proxy = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    answer = paceline("train", "cifar10-cnn", "--processes", "1", cwd=tmp_path, **proxy)
    assert_one_screen(answer, DATA, "could not download", "cifar-10-binary.tar.gz")


def test_batch_larger_than_the_training_set(tmp_path: Path) -> None:
    answer = paceline("train", "--num-samples", "100", "--processes", "1", cwd=tmp_path)
    assert_one_screen(answer, USER, "larger than the training set", "up to 90")


def test_things_that_are_not_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.png").write_bytes(b"")
    for arguments, part in [
        (["evaluate", "empty"], "not a run folder"),
        (["predict", "empty"], "no picture"),
        (["predict", "empty", "y.png"], "no such picture"),
        (["predict", "empty", "x.png"], "not a run folder"),
        (["train", "--resume", "empty"], "no checkpoint here"),
    ]:
        assert_one_screen(paceline(*arguments, cwd=tmp_path), USER, part)


def test_half_a_launcher(tmp_path: Path) -> None:
    answer = paceline("train", cwd=tmp_path, RANK="0", WORLD_SIZE="2")
    assert_one_screen(answer, USER, "LOCAL_RANK", "torchrun")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    answer = paceline("train", "--epochs", "0", "--debug", cwd=tmp_path)
    assert answer.code == USER
    assert "Traceback" in answer.err
