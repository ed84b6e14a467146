"""`paceline data look`: one page for every kind of data, and one screen for a mistake."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.cli import paceline

SHAPES = ("data", "look", "shapes-cnn", "--num-samples=400", "--global-batch-size=60")
OWN = """
import numpy as np

def load():
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (n, 20, 30, 3), dtype=np.uint8) for n in (60, 20))
    test[4] = train[9]
    return (train, np.arange(60) % 3), (test, np.arange(20) % 3)
"""


def sections(page: Path) -> list[str]:
    text = page.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)  # the page loads nothing
    return re.findall(r'<section id="([^"]+)"', text)


def test_a_page_of_a_built_in_set_has_an_input_per_epoch_and_is_reproducible(tmp_path: Path) -> None:
    flags = ("--mixup-alpha=0.5", "--policy=randaugment", "--at-epochs=0,2,4", "--samples=3")
    first, second = (paceline(*SHAPES, *flags, f"--html={name}.html", cwd=tmp_path) for name in ("a", "b"))
    assert (first.code, second.code) == (0, 0), first
    text = (tmp_path / "a.html").read_text()
    assert text == (tmp_path / "b.html").read_text()
    assert sections(tmp_path / "a.html") == ["summary", "inputs", "classes", "statistics", "duplicates"]
    assert text.count("data:image/png") == 3 * (1 + 3 * 2 + 1)  # original, input and partner per epoch, evaluation
    assert not (tmp_path / "runs").exists()


def test_a_users_function_with_rectangular_pictures(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    flags = ("--dataset=mine.py:load", "--augment=resized-crop", "--image-size=16", "--global-batch-size=16")
    answer = paceline("data", "look", "shapes-cnn", *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "duplicates" in sections(tmp_path / "data.html")
    assert "test sample 4" in (tmp_path / "data.html").read_text()


def test_vectors_have_no_pictures(tmp_path: Path) -> None:
    flags = ("--dataset=synthetic", "--augment=none", "--num-samples=500", "--model-name=mlp", "--no-check")
    answer = paceline("data", "look", "shapes-cnn", *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "data:image/png" not in (tmp_path / "data.html").read_text()


def test_a_folder_lists_unreadable_files_and_escapes_names(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("ant", "<b>bee"):
            (tmp_path / "pictures" / part / name).mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 256, (24, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pictures" / part / name / f"{number}.png")
    (tmp_path / "pictures" / "train" / "ant" / "0.png").write_bytes(b"no picture")
    flags = ("--dataset=folder", "--data-dir=pictures", "--augment=imagenet", "--image-size=16")
    answer = paceline("data", "look", "shapes-cnn", *flags, "--global-batch-size=4", cwd=tmp_path)
    assert answer.code == 0, answer
    assert "unreadable" in sections(tmp_path / "data.html")
    text = (tmp_path / "data.html").read_text()
    assert "train/ant/0.png" in text
    assert "<b>bee" not in text


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--at-epochs=0,99",), "--at-epochs"),
        (("--at-epochs=x",), "--at-epochs"),
        (("--samples=0",), "--samples"),
        (("--html=absent/page.html",), "--html"),
        (("--dataset=folder", "--data-dir=absent"), "data-dir"),
        (("--global-batch-size=100000",), "larger than the training set"),
    ],
)
def test_a_mistake_gives_one_screen_and_no_page(tmp_path: Path, flags: tuple[str, ...], part: str) -> None:
    answer = paceline(*SHAPES, *flags, cwd=tmp_path)
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ")
    assert part in answer.err
    assert list(tmp_path.glob("*.html")) == []
