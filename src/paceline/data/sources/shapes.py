"""Ten kinds of shape, drawn when loaded: a picture data set that needs no download.

Every picture is 32x32 RGB and shows one shape with random place, size, rotation, stretch and colour. The
background is shaded and striped and has short strokes; pixel noise is added last. A shape is a formula for the
distance to its outline, which also gives smooth edges. The pictures are a pure function of the seed
and the stream. Pixels use only exactly rounded arithmetic (no sine per pixel), so all machines give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.input_size import SHAPES_SAMPLE, check_made_size, count_test_samples
from paceline.settings.schema import DataConfig

Floats = NDArray[np.float32]
Outline = Callable[[Floats, Floats], Floats]

SIDE = 32
TRAIN_STREAM, TEST_STREAM = 0, 1

# These set the difficulty: a linear model fails, a small CNN learns in ten epochs.
# Colours and their differences are in grey levels, 0 to 255 per channel.
SIZE_PIXELS = (9.0, 12.0)
STRETCH = 0.12
GROUND = (25, 115)
CONTRAST = (115, 230)  # distance of the shape's colour from the ground's, towards white
SHADING = 38
STRIPES = 10
STRIPES_PER_PIXEL = (0.04, 0.25)
STROKES = 2
NOISE = 15

MEAN = (0.35, 0.35, 0.35)  # measured; all channels have the same distribution
STD = (0.20, 0.20, 0.20)

_CHUNK = 128  # pictures drawn at a time: their planes fit into the CPU cache
_HALF_ROOT = np.float32(math.sqrt(0.5))
_WINDOW = 12  # pixels; holds the longest stroke
_X = (np.arange(SIDE, dtype=np.float32) + (1 - SIDE) / 2)[None, None, :]  # from the middle, in pixels
_Y = _X.transpose(0, 2, 1)


def _cover(distance: Floats) -> Floats:
    """The fraction of each pixel inside an outline. Edges are one pixel wide and equal for all channels."""
    share: Floats = np.clip(np.float32(0.5) - distance, 0, 1)
    return share[:, None]


def _length(u: Floats, v: Floats) -> Floats:
    length: Floats = np.sqrt(u * u + v * v)
    return length


def _turned(x: Floats, y: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
    return x * cos + y * sin, y * cos - x * sin


def _both(*distances: Floats) -> Floats:
    """Inside all of these outlines."""
    farthest: Floats = np.maximum.reduce(distances)
    return farthest


def _either(one: Floats, other: Floats) -> Floats:
    """Inside at least one of two outlines."""
    nearest: Floats = np.minimum(one, other)
    return nearest


def _directions(u: Floats, v: Floats, count: int) -> list[Floats]:
    """Each point's distance along `count` evenly spread directions. The first one points down."""
    angles = 2 * np.pi * np.arange(count) / count
    return [u * np.float32(np.sin(angle)) - v * np.float32(np.cos(angle)) for angle in angles]


# Distances to outlines about as large as the unit circle, negative inside.


def _disc(u: Floats, v: Floats) -> Floats:
    return _length(u, v) - 0.9


def _ring(u: Floats, v: Floats) -> Floats:
    return abs(_length(u, v) - 0.75) - 0.2


def _crescent(u: Floats, v: Floats) -> Floats:
    return _both(_length(u, v) - 1.0, 0.8 - _length(u - 0.5, v))


def _square(u: Floats, v: Floats) -> Floats:
    return _both(abs(u), abs(v)) - 0.78


def _triangle(u: Floats, v: Floats) -> Floats:
    return _both(*_directions(u, v, 3)) - 0.55


def _star(u: Floats, v: Floats) -> Floats:
    # A point is in a pentagram if at most one of the five lines cuts it off: use the second-largest distance.
    largest, *others = _directions(u, v, 5)
    second = np.full_like(largest, -np.inf)
    for distance in others:
        second = np.maximum(second, np.minimum(largest, distance))
        largest = np.maximum(largest, distance)
    return second - 0.36


def _cross(u: Floats, v: Floats) -> Floats:
    u, v = abs(u), abs(v)
    return _both(u - 1.0, v - 1.0, _either(u, v) - 0.28)


def _heart(u: Floats, v: Floats) -> Floats:
    # A rectangle standing on its corner, with a disc on each of its upper sides.
    u = abs(u)
    rectangle = _both(u - v - 0.81, u + v - 0.56) * _HALF_ROOT
    return _either(rectangle, _length(u - 0.46, v - 0.36) - 0.5)


def _arrow(u: Floats, v: Floats) -> Floats:
    v = abs(v)
    head = _both(-u, (u + v - 1.0) * _HALF_ROOT)
    shaft = _both(abs(u + 0.45) - 0.6, v - 0.22)
    return _either(head, shaft)


def _bars(u: Floats, v: Floats) -> Floats:
    v = abs(v)
    return _both(abs(u) - 0.9, _either(v, abs(v - 0.72)) - 0.2)


OUTLINES: dict[str, Outline] = {
    "disc": _disc,
    "ring": _ring,
    "crescent": _crescent,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "heart": _heart,
    "arrow": _arrow,
    "bars": _bars,
}
CLASSES = tuple(OUTLINES)


class _Pen:
    """Draws `count` pictures at a time; every random number comes from one generator, in order."""

    def __init__(self, random: np.random.Generator, count: int) -> None:
        self.random = random
        self.count = count

    def draw(self, low: float, high: float, *tail: int) -> Floats:
        """Uniform numbers, one per picture, shaped to broadcast over its planes."""
        shape = (self.count, *tail) if tail else (self.count, 1, 1)
        return (low + (high - low) * self.random.random(shape)).astype(np.float32)

    def turn(self) -> tuple[Floats, Floats]:
        angle = 2 * np.pi * self.random.random((self.count, 1, 1))
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def ground(self, flat: Floats) -> Floats:
        """A flat colour, shaded in one direction and striped in another."""
        cos, sin = self.turn()
        slope = (_X * cos + _Y * sin) * np.float32(1 / SIDE)
        cos, sin = self.turn()
        wave = (_X * cos + _Y * sin) * self.draw(*STRIPES_PER_PIXEL) + self.draw(0, 1)
        wave = abs(wave - np.floor(wave) - 0.5) - 0.25
        canvas = slope[:, None] * self.draw(-2 * SHADING, 2 * SHADING, 3, 1, 1)
        canvas += wave[:, None] * self.draw(-4 * STRIPES, 4 * STRIPES, 3, 1, 1)
        canvas += flat
        return canvas

    def stroke(self, canvas: Floats) -> None:
        """Draw a short thick line of any colour. For speed only a window around it is changed."""
        centre = self.draw(0, SIDE, 2, 1)
        corner = np.clip(centre - _WINDOW / 2, 0, SIDE - _WINDOW).astype(np.intp)
        pixels = corner + np.arange(_WINDOW)
        offset = (pixels + 0.5).astype(np.float32) - centre
        along, across = _turned(offset[:, 0, None, :], offset[:, 1, :, None], *self.turn())
        reach = self.draw(0, 4)
        along = along - np.clip(along, -reach, reach)
        cover = _cover(_length(along, across) - self.draw(0.5, 1.5))
        planes = np.arange(self.count * 3).reshape(-1, 3, 1, 1)
        window = (planes * SIDE + pixels[:, 1, None, :, None]) * SIDE + pixels[:, 0, None, None, :]
        under = canvas.take(window)
        canvas.put(window, under + cover * (self.draw(10, 245, 3, 1, 1) - under))

    def shape(self, canvas: Floats, outline: Outline, colour: Floats) -> None:
        """Draw the shape over everything else. It is nearly always completely inside the picture."""
        size, stretch = self.draw(*SIZE_PIXELS), self.draw(1 - STRETCH, 1 + STRETCH)
        room = size * np.float32(-0.9) + SIDE / 2
        x, y = _X + room * self.draw(-1, 1), _Y + room * self.draw(-1, 1)
        u, v = _turned(x, y, *self.turn())
        cover = _cover(outline(u / (size * stretch), v * (stretch / size)) * size)
        change = colour - canvas
        change *= cover
        canvas += change

    def lighter(self, colour: Floats) -> Floats:
        """A lighter colour at a random distance of at least the minimum contrast."""
        step = self.draw(0, 1, 3, 1, 1)
        step *= self.draw(*CONTRAST, 1, 1, 1) / np.sqrt((step * step).sum(axis=1, keepdims=True))
        return (colour + step).clip(max=255)

    def pictures(self, outline: Outline) -> NDArray[np.uint8]:
        flat = self.draw(*GROUND, 3, 1, 1)
        canvas = self.ground(flat)
        for _ in range(STROKES):
            self.stroke(canvas)
        self.shape(canvas, outline, self.lighter(flat))
        noise = self.random.integers(-128, 128, canvas.shape, dtype=np.int8)
        canvas += noise.astype(np.float32) * np.float32(NOISE / 128)
        return np.clip(canvas, 0, 255, out=canvas).astype(np.uint8)


def make_shapes(num_samples: int, seed: int, *, stream: int) -> tuple[Tensor, Tensor]:
    """`num_samples` pictures uint8 [N, 3, 32, 32] and their labels int64 [N], classes balanced.

    Streams of one seed share no random number: 0 is the training set, 1 the test set.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, stream]))
    labels = np.arange(num_samples, dtype=np.int64) % len(CLASSES)
    random.shuffle(labels)
    images = np.empty((num_samples, 3, SIDE, SIDE), dtype=np.uint8)
    for label, outline in enumerate(OUTLINES.values()):
        places = np.flatnonzero(labels == label)
        for start in range(0, len(places), _CHUNK):
            chunk = places[start : start + _CHUNK]
            images[chunk] = _Pen(random, len(chunk)).pictures(outline)
    return torch.from_numpy(images), torch.from_numpy(labels)


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    check_made_size(config)
    return DatasetInfo(
        name="shapes",
        num_train=config.num_samples,
        num_test=count_test_samples(config.num_samples),
        classes=CLASSES,
        sample_shape=SHAPES_SAMPLE,
        mean=MEAN,
        std=STD,
    )


def load(config: DataConfig, seed: int) -> LoadedData:
    info = describe(config, seed)
    train = make_shapes(info.num_train, seed, stream=TRAIN_STREAM)
    test = make_shapes(info.num_test, seed, stream=TEST_STREAM)
    return LoadedData(info, ResidentDataset(*train), ResidentDataset(*test))
