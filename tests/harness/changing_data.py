"""A data set that a test changes between two starts of a run, through `variant.json` in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = ["a", "b", "c", "d"]
SAMPLES = 320


def load(data_dir: str) -> dict[str, Any]:
    """Arrays. The pixels of a sample are computed from its number, so that tests can identify it."""
    path = Path(data_dir) / "variant.json"
    variant = json.loads(path.read_text()) if path.exists() else {}
    pixels, labels = _samples(np.arange(SAMPLES))
    if "order" in variant:
        order = np.random.default_rng(variant["order"]).permutation(SAMPLES)
        pixels, labels = pixels[order], labels[order]
    if "front" in variant:  # insert new samples before the old ones
        more, more_labels = _samples(np.arange(1000, 1000 + variant["front"]))
        pixels, labels = np.concatenate([more, pixels]), np.concatenate([more_labels, labels])
    if "fewer" in variant:
        pixels, labels = pixels[: -variant["fewer"]], labels[: -variant["fewer"]]
    if variant.get("labels"):
        labels = np.roll(labels, 1)
    if variant.get("pixel"):
        pixels[7, 0, 0, 0] ^= 1
    if variant.get("all"):
        pixels, labels = _samples(np.arange(5000, 5000 + SAMPLES))
    test, test_labels = _samples(np.arange(9000, 9064 + 8 * bool(variant.get("test"))))
    classes = CLASSES[::-1] if variant.get("classes") else CLASSES
    data = {"train": (pixels, labels), "test": (test, test_labels), "classes": classes}
    if "validation" in variant:  # a set of its own, of these numbers
        data["validation"] = _samples(np.arange(*variant["validation"]))
    return data


def _samples(numbers: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pixels = np.stack([np.random.default_rng(int(n)).integers(0, 256, (3, 8, 8), dtype=np.uint8) for n in numbers])
    return pixels, numbers.astype(np.int64) % len(CLASSES)
