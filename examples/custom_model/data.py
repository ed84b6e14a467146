"""Your own data set: a function that returns train and test data, and the names of the classes.

Train and test are each a pair of arrays: uint8 images [N, H, W, C] or [N, C, H, W], and whole numbers as labels.
"""

from __future__ import annotations

import numpy as np

SIDE = 16
CLASSES = ["horizontal", "vertical", "diagonal"]


def make_stripes(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], list[str]]:
    """Grey stripes in three directions, with noise. They depend only on the seed, so all ranks get the same data."""
    rng = np.random.default_rng(seed)
    return _half(rng, 1200), _half(rng, 300), CLASSES


def _half(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.integers(0, len(CLASSES), size)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    along = np.stack([rows, columns, rows + columns])[labels]
    phases = rng.uniform(0, 2 * np.pi, (size, 1, 1))
    waves = 128 + 40 * np.sin(along * 1.3 + phases) + rng.normal(0, 80, (size, SIDE, SIDE))
    return waves.clip(0, 255).astype(np.uint8)[..., None], labels
