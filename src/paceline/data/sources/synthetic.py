"""Synthetic samples of any size, for trials without data.

A vector is the centre of its class plus Gaussian noise. An image is such a vector, read as a coarse grid of
colours, enlarged by interpolation, with pixel noise added. Both halves have the same centres and different
noise. The classes overlap on purpose: a model with perfect test accuracy has seen the test labels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.input_size import CENTRE_SIDE, check_made_size, count_test_samples, parse_input_size
from paceline.settings.schema import DataConfig

Floats = NDArray[np.float32]

CENTRE_STREAM, TRAIN_STREAM, TEST_STREAM = 2, 3, 4  # 0 and 1 belong to the shapes

SEPARATION = 2.7  # half the distance between two centres, in standard deviations of the noise
IMAGE_GAIN, PIXEL_NOISE = 32.0, 80.0  # grey levels: per standard deviation; full range of the noise
_CHUNK = 512  # images enlarged at a time


def make_synthetic(
    num_samples: int, shape: tuple[int, ...], num_classes: int, seed: int, *, stream: int
) -> tuple[Tensor, Tensor]:
    """float32 vectors or uint8 images of this shape, and labels int64 [N], classes balanced."""
    random = _random(seed, stream)
    labels = np.arange(num_samples, dtype=np.int64) % num_classes
    random.shuffle(labels)
    if len(shape) == 1:
        samples = torch.from_numpy(_vectors(labels, shape[0], num_classes, seed, random))
    else:
        samples = torch.from_numpy(_images(labels, shape, num_classes, seed, random))
    return samples, torch.from_numpy(labels)


def _random(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, stream]))


def _vectors(
    labels: NDArray[np.int64], length: int, num_classes: int, seed: int, random: np.random.Generator
) -> Floats:
    # Random directions in many dimensions are nearly orthogonal, so equal norms give equal distances.
    centres = _random(seed, CENTRE_STREAM).standard_normal((num_classes, length))
    centres *= SEPARATION * math.sqrt(2) / np.linalg.norm(centres, axis=1, keepdims=True)
    vectors = random.standard_normal((len(labels), length), dtype=np.float32)
    vectors += centres.astype(np.float32)[labels]
    return vectors


def _images(
    labels: NDArray[np.int64],
    shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    random: np.random.Generator,
) -> NDArray[np.uint8]:
    channels, height, width = shape
    grids = _vectors(labels, channels * CENTRE_SIDE * CENTRE_SIDE, num_classes, seed, random)
    grids = grids.reshape(-1, channels, CENTRE_SIDE, CENTRE_SIDE) * np.float32(IMAGE_GAIN) + np.float32(128)
    down, across = _enlarge(height), _enlarge(width).T
    images = np.empty((len(labels), *shape), dtype=np.uint8)
    for start in range(0, len(labels), _CHUNK):
        pixels = down @ grids[start : start + _CHUNK] @ across
        noise = random.integers(0, 256, pixels.shape, dtype=np.uint8)
        pixels += (noise.astype(np.float32) - 127.5) * np.float32(PIXEL_NOISE / 255)
        images[start : start + _CHUNK] = np.clip(pixels, 0, 255)
    return images


def _enlarge(side: int) -> Floats:
    """[side, CENTRE_SIDE]: weights of linear interpolation between the points of the grid."""
    positions = np.linspace(0, CENTRE_SIDE - 1, side)[:, None]
    return (1 - abs(positions - np.arange(CENTRE_SIDE))).clip(min=0).astype(np.float32)


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    shape = parse_input_size(config.input_size)
    check_made_size(config)
    channels = shape[0] if len(shape) == 3 else 0
    return DatasetInfo(
        name="synthetic",
        num_train=config.num_samples,
        num_test=count_test_samples(config.num_samples),
        classes=tuple(str(label) for label in range(config.num_classes)),
        sample_shape=shape,
        mean=(0.5,) * channels,
        std=(0.14,) * channels,
    )


def load(config: DataConfig, seed: int) -> LoadedData:
    info = describe(config, seed)
    shape, classes = info.sample_shape, info.num_classes
    train = make_synthetic(info.num_train, shape, classes, seed, stream=TRAIN_STREAM)
    test = make_synthetic(info.num_test, shape, classes, seed, stream=TEST_STREAM)
    return LoadedData(info, ResidentDataset(*train), ResidentDataset(*test))
