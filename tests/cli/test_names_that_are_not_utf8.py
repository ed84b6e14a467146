"""Names that are not UTF-8 give one screen, or work. They never give a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.cli import Answer, paceline
from paceline.data.pack_format import read_finished
from paceline.data.picture_folder import find_pictures
from paceline.errors import EXIT_USER, UserError

BAD = "caf\udce9"  # the bytes of "café" in Latin-1, as Python stores them
FLAGS = ["--dataset=folder", "--image-size=32", "--augment=none", "--epochs=1", "--num-workers=0", "--processes=1"]
FLAGS += ["--global-batch-size=4", "--track"]


def pictures(root: Path, classes: tuple[str, ...] = ("cat", "dog"), name: str = "{}.png") -> Path:
    draw = np.random.default_rng(0)
    for half, count in (("train", 8), ("test", 2)):
        for label in classes:
            folder = root / half / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                with open(os.fsencode(folder / name.format(number)), "wb") as file:  # noqa: PTH123 - a name of bytes
                    Image.fromarray(pixels).save(file, format="PNG")
    return root


def one_screen(answer: Answer, name: str = "caf\\xe9") -> None:
    assert answer.code == EXIT_USER, answer.err
    assert answer.err.startswith("error: ")
    assert name in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("name", [BAD, "a\nb", "a\x1b[31mb", "a\u202eb"], ids=ascii)
def test_a_class_folder_with_such_a_name_is_refused(tmp_path: Path, name: str) -> None:
    """JSON, tables and pages contain class names. An invalid one is named, escaped, and refused."""
    pictures(tmp_path / "data", ("cat", name))
    with pytest.raises(UserError) as refused:
        find_pictures(tmp_path / "data")
    refused.value.screen().encode()


TRAIN = ["train", "shapes-cnn", *FLAGS, "--data-dir=data"]


@pytest.mark.parametrize("verb", [TRAIN, ["data", "pack", "data", "packed"]], ids=["train", "pack"])
def test_commands_refuse_such_a_name_with_one_screen(tmp_path: Path, verb: list[str]) -> None:
    """Exit code 2, not 70."""
    pictures(tmp_path / "data", ("cat", BAD))
    one_screen(paceline(*verb, cwd=tmp_path))


def test_pictures_with_such_names_are_read(tmp_path: Path) -> None:
    """A file's name only sets its split and its order. Any bytes are valid, also in one folder and in a pack."""
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir()
        for number in range(20):
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            with open(os.fsencode(tmp_path / "data" / label / f"{BAD}-{number}.png"), "wb") as file:  # noqa: PTH123
                Image.fromarray(pixels).save(file, format="PNG")
    broken = tmp_path / "data" / "cat" / f"{BAD}-broken.png"
    with open(os.fsencode(broken), "wb") as file:  # noqa: PTH123
        file.write(b"no picture")
    found = find_pictures(tmp_path / "data")
    assert sum(len(part.paths) for _, part in found) == 41
    packed = paceline("data", "pack", "data", "packed", "--image-size=32", "--unreadable=1", cwd=tmp_path)
    assert packed.code == 0, packed.err
    description = read_finished(tmp_path / "packed")
    assert [Path(name).name for name in description.unreadable] == [broken.name]
    json.loads((tmp_path / "packed" / "packed.json").read_text())


@pytest.mark.long
def test_a_run_in_a_folder_with_such_a_name(tmp_path: Path) -> None:
    """The working directory may have any name. The files of a run are readable."""
    home = tmp_path / BAD
    home.mkdir()
    (home / "own.py").write_text("def loss(logits, labels):\n    return logits.logsumexp(1) - logits[:, 0]\n")
    flags = ["--num-samples=128", "--epochs=1", "--global-batch-size=64", "--processes=1", "--loss=own.py:loss"]
    answer = paceline("train", "shapes-cnn", *flags, "--output-dir=run", cwd=home)
    assert answer.code == 0, answer.err
    for name in ("environment.json", "status.json", "results.json"):
        json.loads((home / "run" / name).read_text(encoding="utf-8"))
    (home / "run" / "report.html").read_text(encoding="utf-8")
    for words in (["evaluate", "run"], ["runs", "--in", "."], ["status", "run"]):
        answer = paceline(*words, cwd=home)
        assert answer.code == 0, (words, answer.err)


@pytest.mark.parametrize("flag", ["--data-dir", "--output-dir", "--resume", "--loss", "--weights", "--init-from"])
def test_flags_with_such_names_are_refused(tmp_path: Path, flag: str) -> None:
    """config.yaml, which is UTF-8, would contain them."""
    one_screen(paceline("train", "shapes-cnn", f"{flag}={BAD}", cwd=tmp_path))


def test_arguments_of_other_commands(tmp_path: Path) -> None:
    """A run, a recipe or a picture with such a name: one screen."""
    for words in (["train", BAD], ["evaluate", BAD], ["status", BAD], ["data", "check", BAD], ["compare", BAD, BAD]):
        answer = paceline(*words, cwd=tmp_path)
        assert answer.code in (2, 3), (words, answer.err)
        assert answer.err.startswith("error: "), answer.err
