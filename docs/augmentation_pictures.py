"""Draw docs/images/augmentation: what each augmentation makes of one picture, by the code that training uses.

    python docs/augmentation_pictures.py            write the pictures
    python docs/augmentation_pictures.py --check    list the pictures that are out of date; exit code 1 if there are any

A picture is a row: the original, then the inputs of one sample in consecutive epochs, or its repeats in one batch.
Rows of single operations show eight strengths instead. A level of difference is allowed: CPUs round resized pixels
differently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from paceline.data import policies
from paceline.data.augment import Pipeline, build_pipeline
from paceline.data.dataset import DatasetInfo
from paceline.data.order import draw_keys
from paceline.data.preview import to_pixels
from paceline.settings.schema import DataConfig

FOLDER = Path(__file__).parent / "images" / "augmentation"
_SIDE, _TILES, _GAP = 64, 9, 2
_SAMPLE, _SEED = 5, 1
_LEVEL = 1

SETTINGS: dict[str, dict[str, Any]] = {
    "light": {"augment": "light"},
    "gentle": {"augment": "gentle"},
    "lively": {"augment": "lively"},
    "imagenet": {"augment": "imagenet"},
    "resized-crop": {"augment": "resized-crop"},
    "vertical-flip": {"vertical_flip": True},
    "randaugment": {"policy": "randaugment"},
    "trivial": {"policy": "trivial"},
    "three": {"policy": "three"},
    "color-jitter": {"color_jitter": 0.4},
    "hue-jitter": {"hue_jitter": 0.2},
    "grayscale": {"grayscale": 0.5},
    "blur": {"blur": 0.5},
    "solarize": {"solarize": 0.5},
    "cutout": {"cutout": 24},
    "erase": {"erase": 0.5},
    "mixup": {"mixup_alpha": 1.0},
    "cutmix": {"cutmix_alpha": 1.0},
    "resolution-schedule": {"augment": "resized-crop", "resolution_schedule": "0:32,3:48,6:64"},
    "repeat-augment": {"augment": "resized-crop", "repeat_augment": 8},
}
OPERATIONS = {
    "shear-x": policies.SHEAR_X,
    "shear-y": policies.SHEAR_Y,
    "translate-x": policies.TRANSLATE_X,
    "translate-y": policies.TRANSLATE_Y,
    "rotate": policies.ROTATE,
    "brightness": policies.BRIGHTNESS,
    "contrast": policies.CONTRAST,
    "posterize": policies.POSTERIZE,
    "solarize-below": policies.SOLARIZE,
    "auto-contrast": policies.AUTO_CONTRAST,
    "equalize": policies.EQUALIZE,
    "color": policies.COLOR,
    "sharpness": policies.SHARPNESS,
}


def draw_scene() -> Tensor:
    """A house, a tree and the sun: uint8 [3, side, side]. By numpy alone, so every machine draws the same bytes."""
    row, column = np.mgrid[0:_SIDE, 0:_SIDE] / _SIDE
    picture = np.stack([90 + 60 * row, 150 + 50 * row, 225 - 20 * row], -1)
    ground = row > 0.72 + 0.04 * np.sin(7 * column)
    picture[ground] = np.stack([70 + 60 * row, 130 + 30 * row, 60 + 0 * row], -1)[ground]
    picture[(row - 0.18) ** 2 + (column - 0.8) ** 2 < 0.011] = (250, 215, 70)
    picture[(row > 0.45) & (row < 0.82) & (column > 0.12) & (column < 0.52)] = (205, 170, 140)
    picture[(row > 0.22) & (row < 0.46) & (abs(column - 0.32) < (row - 0.2) * 1.05)] = (165, 60, 50)
    picture[(row > 0.6) & (row < 0.82) & (column > 0.34) & (column < 0.44)] = (95, 60, 40)
    picture[(row > 0.54) & (row < 0.66) & (column > 0.17) & (column < 0.28)] = (240, 240, 190)
    picture[(row > 0.6) & (row < 0.85) & (abs(column - 0.74) < 0.02)] = (100, 70, 45)
    picture[(row - 0.52) ** 2 + (column - 0.74) ** 2 < 0.018] = (45, 105, 50)
    return torch.from_numpy(picture.round().astype(np.uint8)).permute(2, 0, 1).contiguous()


def draw_partner() -> Tensor:
    """A boat on the sea, for the rows that mix two pictures."""
    row, column = np.mgrid[0:_SIDE, 0:_SIDE] / _SIDE
    picture = np.stack([240 - 60 * row, 200 - 40 * row, 160 + 20 * row], -1)
    sea = row > 0.62 + 0.015 * np.sin(40 * column)
    picture[sea] = np.stack([30 + 0 * row, 70 + 40 * row, 130 + 40 * row], -1)[sea]
    picture[(row > 0.62) & (row < 0.74) & (abs(column - 0.5) < 0.3 - (row - 0.62))] = (120, 40, 40)
    picture[(row > 0.16) & (row < 0.62) & (abs(column - 0.48) < 0.012)] = (70, 50, 40)
    picture[(row > 0.18) & (row < 0.58) & (column > 0.5) & (column < 0.5 + (row - 0.18) * 0.6)] = (250, 250, 245)
    return torch.from_numpy(picture.round().astype(np.uint8)).permute(2, 0, 1).contiguous()


def main(arguments: list[str]) -> int:
    stale = False
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, row in rows():
        path = FOLDER / f"{name}.png"
        if not is_like(path, row):
            stale = True
            if "--check" in arguments:
                print(f"out of date: {path}; run: python docs/augmentation_pictures.py")
            else:
                Image.fromarray(row).save(path, "PNG", optimize=True)
    return int(stale and "--check" in arguments)


def is_like(path: Path, row: np.ndarray[Any, Any]) -> bool:
    if not path.exists():
        return False
    drawn = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return drawn.shape == row.shape and int(abs(drawn - row).max()) <= _LEVEL


def rows() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Each picture by name, as uint8 [H, W, 3]."""
    pair = torch.stack([draw_scene(), draw_partner()])
    for name, settings in SETTINGS.items():
        config = DataConfig(**{"augment": "none", "image_size": _SIDE, **settings})
        info = DatasetInfo("drawn", 2, 1, ("house", "boat"), (3, _SIDE, _SIDE), (0.5,) * 3, (0.25,) * 3)
        yield name, _strip([pair[0], *_inputs(build_pipeline(config, info, _SEED), pair)])
    for name, operation in OPERATIONS.items():
        strengths = torch.linspace(0, policies.BINS - 1, _TILES - 1)
        samples = pair[:1].expand(_TILES - 1, -1, -1, -1).contiguous()
        negative = torch.arange(_TILES - 1) % 2 == 1
        which = torch.full((_TILES - 1,), operation)
        changed = policies.apply_operation(samples, which, strengths, negative, policies.RAND_AUGMENT)
        yield name, _strip([pair[0], *changed])


def _inputs(pipeline: Pipeline, pair: Tensor) -> Iterator[Tensor]:
    """The inputs of the first sample: one per epoch, or all of its repeats in epoch 0."""
    ids, labels = torch.tensor([_SAMPLE, _SAMPLE + 1]), torch.tensor([0, 1])
    for number in range(_TILES - 1):
        epoch, repeat = (0, number) if pipeline.repeats > 1 else (number, 0)
        drawn = pipeline.draw(draw_keys(ids, repeat), pipeline.keys_of(epoch))
        inputs, _ = pipeline.mix(pipeline.in_epoch(epoch).augment(pair, drawn), labels, drawn)
        yield to_pixels(inputs, pipeline)[0]


def _strip(tiles: list[Tensor]) -> np.ndarray[Any, Any]:
    step = _SIDE + _GAP
    row = np.full((_SIDE, step * len(tiles) - _GAP, 3), 255, dtype=np.uint8)
    for number, tile in enumerate(tiles):
        row[: tile.shape[1], number * step : number * step + tile.shape[2]] = tile.permute(1, 2, 0).numpy()
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
