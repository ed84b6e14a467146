"""Every mistake gets one screen, the right exit code and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from harness.cli import assert_refused, command, paceline

USER, DATA = 2, 3


def test_a_missing_recipe(tmp_path: Path) -> None:
    assert_refused(paceline("train", "shape-cnn", cwd=tmp_path), USER, "no recipe", "paceline train shapes-cnn")
    assert_refused(paceline("train", ".", cwd=tmp_path), USER, "not a folder")
    assert_refused(paceline("trian", cwd=tmp_path), USER, "unknown command", "paceline train")


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
    for number in range(20):  # all of one class, so that the first batch contains one
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
    assert_refused(answer, DATA, *parts)


def test_data_that_cannot_be_downloaded(tmp_path: Path) -> None:
    # A proxy that refuses every connection simulates a machine without a network.
    proxy = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    answer = paceline("train", "cifar10-cnn", "--processes", "1", cwd=tmp_path, env=proxy)
    assert_refused(answer, DATA, "could not download", "cifar-10-binary.tar.gz")


def test_batch_larger_than_the_training_set(tmp_path: Path) -> None:
    answer = paceline("train", "--num-samples", "100", "--processes", "1", cwd=tmp_path)
    assert_refused(answer, USER, "larger than the training set", "up to 90")


def test_folders_that_are_not_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.png").write_bytes(b"")
    for arguments, part in [
        (["evaluate", "empty"], "not a run folder"),
        (["predict", "empty"], "no picture"),
        (["predict", "empty", "y.png"], "no such picture"),
        (["predict", "empty", "x.png"], "not a run folder"),
        (["train", "--resume", "empty"], "no checkpoint here"),
    ]:
        assert_refused(paceline(*arguments, cwd=tmp_path), USER, part)


def test_an_incomplete_launcher_environment(tmp_path: Path) -> None:
    answer = paceline("train", cwd=tmp_path, RANK="0", WORLD_SIZE="2")
    assert_refused(answer, USER, "LOCAL_RANK", "torchrun")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    answer = paceline("train", "--epochs", "0", "--debug", cwd=tmp_path)
    assert answer.code == USER
    assert "Traceback" in answer.err


def test_too_few_open_files_give_one_screen(tmp_path: Path) -> None:
    """`ulimit -n 32`: exit code 2 before the start, with the limit and a remedy."""
    train = f"{sys.executable} -m paceline train synthetic-mlp --processes=2 --output-dir=run"
    answer = command("bash", "-c", f"ulimit -n 32; {train}", cwd=tmp_path)
    assert answer.code == 2, answer
    assert "ulimit -n" in answer.err
    assert "32" in answer.err
    assert not (tmp_path / "run").exists()


def test_a_low_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """The hard limit is set by the administrator. The soft limit is only a default."""
    flags = "--processes=1 --num-samples=640 --epochs=1 --global-batch-size=64 --quiet --output-dir=run"
    answer = command(
        "bash", "-c", f"ulimit -Sn 32; {sys.executable} -m paceline train synthetic-mlp {flags}", cwd=tmp_path
    )
    assert answer.code == 0, answer


@pytest.mark.parametrize("place", ["file://{}/taken/run", "{}/taken/run", "{}/taken"])
@pytest.mark.parametrize("flags", [[], ["--resume=auto"]])
def test_a_path_below_a_file_names_a_remedy(place: str, flags: list[str], tmp_path: Path) -> None:
    """A store or a folder below a file: exit code 2, with a remedy."""
    (tmp_path / "taken").write_text("mine")
    answer = paceline("train", "synthetic-mlp", f"--output-dir={place.format(tmp_path)}", *flags, cwd=tmp_path)
    assert_refused(answer, USER, "taken", "try:")
    assert (tmp_path / "taken").read_text() == "mine"
