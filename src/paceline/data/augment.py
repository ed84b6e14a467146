"""Turns raw samples into model inputs, one batch at a time, on the batch's device.

Every random choice is drawn from (seed, epoch, sample id, draw number). A sample therefore gets the same
pixels in an epoch on any rank, in any worker and in any batch. Nothing here reads a value back from the device, so
the work can be recorded as a CUDA graph (runtime/recorded.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.dataset import DatasetInfo
from paceline.data.draws import below, draw_bits_from, start_of, turn_even
from paceline.errors import UserError
from paceline.settings.schema import DataConfig

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SHIFTED = {"light": 8, "gentle": 16, "lively": 8}  # crops move by at most 1/8 or 1/16 of a side
MIRRORED = ("gentle", "lively")  # mirror the borders, and flip each sample in every other epoch
_ROW, _COLUMN, _FLIP, _CUT_ROW, _CUT_COLUMN = _DRAWS = range(10, 15)  # draw numbers


@dataclass(frozen=True)
class Pipeline:
    """How one data set's samples are turned into inputs, for training and for evaluation."""

    kind: str  # "none", one of SHIFTED, or "imagenet"
    seed: int
    raw_shape: tuple[int, ...]
    image_size: int
    flip: bool
    cutout: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one model input."""
        if self.kind == "imagenet":
            return (self.raw_shape[0], self.image_size, self.image_size)
        return self.raw_shape

    @property
    def resized_side(self) -> int:
        """The imagenet pipeline crops 224 out of 256, and other sizes in the same proportion."""
        return round(self.image_size * 256 / 224)

    def for_training(self, samples: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """Augmented, normalised float inputs; ids are the samples' numbers in the data set."""
        if samples.dim() != 4:
            return samples
        return self.augment(samples, self.draw(ids.to(samples.device), self.keys_of(epoch).to(samples.device)))

    def keys_of(self, epoch: int) -> Tensor:
        """The keys of an epoch's choices: one number per draw, and last the bits that reverse the flips."""
        alternates = self.kind in MIRRORED  # the flip draw is then the same in every epoch; odd epochs reverse it
        starts = [start_of(draw, self.seed, 0 if draw == _FLIP and alternates else epoch) for draw in _DRAWS]
        return torch.tensor([*starts, turn_even(epoch) if alternates else 0])

    def draw(self, ids: Tensor, keys: Tensor) -> Tensor:
        """Random bits for these samples, one layer per choice. `ids` may have any shape, for example a whole epoch."""
        if len(self.raw_shape) != 3:
            return ids
        count = len(_DRAWS) if self.cutout else 3
        bits = draw_bits_from(ids, keys[:count].view(-1, *[1] * ids.dim()))
        bits[_DRAWS.index(_FLIP)] ^= keys[-1]
        return bits

    def augment(self, samples: Tensor, drawn: Tensor) -> Tensor:
        """Like `for_training`, with bits that are drawn already. All tensors are on one device."""
        if samples.dim() != 4:
            return samples
        bits = dict(zip(_DRAWS, drawn, strict=False))
        if self.kind in SHIFTED:
            border = self.raw_shape[1] // SHIFTED[self.kind]
            bordered = _mirror_borders(samples, border) if self.kind in MIRRORED else F.pad(samples, [border] * 4)
            samples = _crop(bordered, self.raw_shape[1:], bits[_ROW], bits[_COLUMN])
        elif self.kind == "imagenet":
            samples = _crop(self._resize(samples), (self.image_size,) * 2, bits[_ROW], bits[_COLUMN])
        if self.flip and self.kind != "none":
            mirrored = below(2, bits[_FLIP]).bool()
            samples = torch.where(mirrored[:, None, None, None], samples.flip(-1), samples)
        inputs = self._normalise(samples)
        return self._cut_out(inputs, bits) if self.cutout else inputs

    def for_evaluation(self, samples: Tensor) -> Tensor:
        """Normalised inputs without any randomness; the imagenet pipeline takes the centre."""
        if samples.dim() != 4:
            return samples
        if self.kind == "imagenet":
            samples = self._resize(samples)
            top, left = ((size - self.image_size) // 2 for size in samples.shape[2:])
            samples = samples[:, :, top : top + self.image_size, left : left + self.image_size]
        return self._normalise(samples)

    def _resize(self, samples: Tensor) -> Tensor:
        """Bring the shorter side to `resized_side`."""
        height, width = samples.shape[2:]
        scale = self.resized_side / min(height, width)
        if scale == 1.0:
            return samples
        size = (round(height * scale), round(width * scale))
        return F.interpolate(samples.float(), size, mode="bilinear", align_corners=False, antialias=scale < 1.0)

    def _normalise(self, samples: Tensor) -> Tensor:
        mean, std = (_per_channel(values, samples.device) for values in (self.mean, self.std))
        # Change the memory layout while the values are still bytes. The arithmetic is then done in place.
        inputs = samples.contiguous(memory_format=torch.channels_last).float()
        return (inputs.sub_(mean) if inputs is not samples else inputs - mean).div_(std)

    def _cut_out(self, inputs: Tensor, bits: dict[int, Tensor]) -> Tensor:
        """Set a square to the mean colour, which is zero after normalisation."""
        inside = []
        for size, number in zip(inputs.shape[2:], (_CUT_ROW, _CUT_COLUMN), strict=True):
            start = below(size, bits[number])[:, None] - self.cutout // 2
            axis = torch.arange(size, device=inputs.device)[None]
            inside.append((axis >= start) & (axis < start + self.cutout))
        square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return inputs.masked_fill_(square, 0.0)


def _crop(samples: Tensor, size: tuple[int, ...], row_bits: Tensor, column_bits: Tensor) -> Tensor:
    height, width = size
    rows = below(samples.shape[2] - height + 1, row_bits)
    columns = below(samples.shape[3] - width + 1, column_bits)
    # A view of every window of every sample; indexing copies only the chosen ones.
    windows = samples.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(samples), device=samples.device), :, rows, columns]


def _mirror_borders(samples: Tensor, border: int) -> Tensor:
    """Add borders that mirror the picture. torch's reflection padding does not support uint8."""
    for axis in (2, 3):
        size = samples.shape[axis]
        places = torch.arange(-border, size + border, device=samples.device).abs()
        samples = samples.index_select(axis, torch.minimum(places, 2 * (size - 1) - places))
    return samples


@lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Cached: copying to the GPU for every batch would synchronise with it."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1) * 255


def build_pipeline(config: DataConfig, info: DatasetInfo, seed: int) -> Pipeline:
    """The pipeline a config asks for; vectors pass through unchanged."""
    kind = config.augment
    if kind == "imagenet" and not info.is_image:
        raise UserError("the imagenet pipeline needs images", got=f"{info.name} has vectors", hint="--augment none")
    if kind in SHIFTED and info.is_image and info.sample_shape[1] != info.sample_shape[2]:
        raise UserError(f"the {kind} pipeline needs square images", got=info.sample_shape, hint="--augment none")
    is_imagenet = kind == "imagenet" and info.sample_shape[0] == 3
    return Pipeline(
        kind=kind,
        seed=seed,
        raw_shape=info.sample_shape,
        image_size=config.image_size,
        flip=config.flip,
        cutout=config.cutout,
        mean=IMAGENET_MEAN if is_imagenet else info.mean,
        std=IMAGENET_STD if is_imagenet else info.std,
    )
