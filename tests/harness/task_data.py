"""Small data sets of every task, for tests: functions for `--dataset`, and folders with CSV files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_TRAIN, _TEST, _SIDE = 160, 48, 8


def _images(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, _SIDE, _SIDE), generator=torch.Generator().manual_seed(seed)).byte()


def several_labels() -> dict[str, Any]:
    """Three labels: which channels are brighter than usual."""
    parts = {name: _images(count, count) for name, count in (("train", _TRAIN), ("test", _TEST))}
    labelled = {name: (images, (images.float().mean((2, 3)) > 127).long()) for name, images in parts.items()}
    return {**labelled, "classes": ["red", "green", "blue"]}


def numbers() -> dict[str, Any]:
    """Two numbers: the mean of the first channel, and of the second."""
    parts = {name: _images(count, count) for name, count in (("train", _TRAIN), ("test", _TEST))}
    return {name: (images, images.float().mean((2, 3))[:, :2] / 127.5 - 1) for name, images in parts.items()}


def rare_classes() -> dict[str, Any]:
    """Seven classes of very different frequency, and a weight of each sample."""
    parts = {}
    for name, count in (("train", _TRAIN), ("test", _TEST)):
        labels = (torch.arange(count).double().sqrt() * 7 / count**0.5).long().clamp(max=6)
        weights = torch.arange(count) % 5
        parts[name] = (_images(count, count), labels, weights)
    return parts


def write_pictures(folder: Path, rows: dict[str, list[tuple[str, str]]]) -> None:
    """`rows`: the lines of each CSV file, as (path, label). Each picture is a small PNG file."""
    for name, listed in rows.items():
        with (folder / name).open("w", newline="") as stream:
            csv.writer(stream).writerows([("path", "label"), *listed])
        for number, (path, _) in enumerate(listed):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((10, 12, 3), (number * 37 % 256, number * 11 % 256, 128), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / path)
