"""Recipes for data that is not here: each one plans and trains two steps on made pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.cli import paceline
from harness.runs import read_results

SIDES = {
    "imagenet-resnet50": (300, 260),
    "imagenet-vit-s": (300, 260),
    "tiny-imagenet-resnet18": (64, 64),
    "tiny-imagenet-vit": (64, 64),
    "cifar100-resnet18": (32, 32),
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
