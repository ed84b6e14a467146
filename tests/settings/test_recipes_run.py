"""Recipes for data that is not here: each one plans and trains two steps on made pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.cli import paceline
from harness.runs import read_results
from paceline.settings.recipe_file import shipped_recipes

SIDES = {
    "imagenet-resnet50": (300, 260),
    "imagenet-vit-s": (300, 260),
    "tiny-imagenet-resnet18": (64, 64),
    "tiny-imagenet-vit": (64, 64),
}
MADE = {
    "cifar100-resnet18": ("3x32x32", "100"),
    "tiny-imagenet-resnet18": ("3x64x64", "200"),
    "tiny-imagenet-vit": ("3x64x64", "200"),
}


def write_pictures(folder: Path, shape: tuple[int, int], per_class: int) -> None:
    noise = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("n01", "n02"):
            (folder / part / name).mkdir(parents=True)
            for index in range(per_class):
                pixels = noise.integers(0, 256, (*shape, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{index}.JPEG")


@pytest.mark.parametrize("recipe", SIDES)
def test_the_recipe_has_a_plan(recipe: str, tmp_path: Path) -> None:
    """With its own batch: the plan decodes nothing, so a few pictures under many names are enough."""
    write_pictures(tmp_path / "data", (8, 8), per_class=700)

    answer = paceline("plan", recipe, "--data-dir=data", "--processes=2", cwd=tmp_path)

    assert answer.code == 0, answer
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("recipe", SIDES)
def test_the_recipe_trains_two_steps(recipe: str, tmp_path: Path) -> None:
    write_pictures(tmp_path / "data", SIDES[recipe], per_class=8)
    flags = ["--global-batch-size=4", "--max-steps=2", "--processes=1", "--track", "--output-dir=run"]

    # The recipe of ImageNet holds one picture in a hundred out: none of sixteen.
    answer = paceline("train", recipe, "--data-dir=data", "--train-split=0.8", *flags, cwd=tmp_path)

    assert answer.code == 0, answer
    assert read_results(tmp_path / "run")["steps"] == 2


def made_data(recipe: str) -> tuple[str, ...]:
    shape, classes = MADE[recipe]
    return ("--dataset", "synthetic", "--input-size", shape, "--num-classes", classes)


@pytest.mark.parametrize("recipe", MADE)
def test_the_header_says_where_the_data_is_and_how_to_try_the_recipe_without_it(recipe: str) -> None:
    header = shipped_recipes()[recipe].read_text()
    assert "# data " in header
    assert " ".join(("paceline train", recipe, "--rehearse", *made_data(recipe))) in header


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["cifar100-resnet18", "tiny-imagenet-vit"])
def test_the_recipe_is_rehearsed_without_its_data(recipe: str, tmp_path: Path) -> None:
    """With the flags of its header, and a smaller batch."""
    small = ("--num-samples", "200", "--global-batch-size", "4", "--processes", "1", "--output-dir", "run")
    answer = paceline("train", recipe, "--rehearse", *made_data(recipe), *small, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "rehearsal passed" in answer.out
