"""From raw samples to model inputs, a batch at a time on the batch's device.

Every random choice is drawn from (seed, epoch, sample id, draw number), so a sample gets the same
pixels in an epoch whichever rank, worker or batch it falls into.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.config.schema import DataConfig
from paceline.data.dataset import DatasetInfo
from paceline.data.draws import draw_below
from paceline.errors import UserError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_ROW, _COLUMN, _FLIP, _CUT_ROW, _CUT_COLUMN = range(10, 15)  # draw numbers


@dataclass(frozen=True)
class Pipeline:
    """How one data set's samples are turned into inputs, for training and for evaluation."""

    kind: str  # "none", "light" or "imagenet"
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
        ids = ids.to(samples.device)
        if self.kind == "light":
            border = self.raw_shape[1] // 8
            samples = self._random_crop(F.pad(samples, [border] * 4), self.raw_shape[1:], ids, epoch)
        elif self.kind == "imagenet":
            samples = self._random_crop(self._resize(samples), (self.image_size,) * 2, ids, epoch)
        if self.flip and self.kind != "none":
            mirrored = self._draw(2, ids, epoch, _FLIP).bool()
            samples = torch.where(mirrored[:, None, None, None], samples.flip(-1), samples)
        inputs = self._normalise(samples)
        return self._cut_out(inputs, ids, epoch) if self.cutout else inputs

    def for_evaluation(self, samples: Tensor) -> Tensor:
        """Normalised inputs without any randomness; the imagenet pipeline takes the centre."""
        if samples.dim() != 4:
            return samples
        if self.kind == "imagenet":
            samples = self._resize(samples)
            top, left = ((size - self.image_size) // 2 for size in samples.shape[2:])
            samples = samples[:, :, top : top + self.image_size, left : left + self.image_size]
        return self._normalise(samples)

    def _draw(self, limit: int, ids: Tensor, epoch: int, number: int) -> Tensor:
        return draw_below(limit, ids, number, self.seed, epoch)

    def _random_crop(self, samples: Tensor, size: tuple[int, ...], ids: Tensor, epoch: int) -> Tensor:
        height, width = size
        rows = self._draw(samples.shape[2] - height + 1, ids, epoch, _ROW)
        columns = self._draw(samples.shape[3] - width + 1, ids, epoch, _COLUMN)
        # Every window of every sample as a view; indexing then copies just the chosen ones.
        windows = samples.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(len(samples), device=samples.device), :, rows, columns]

    def _resize(self, samples: Tensor) -> Tensor:
        """Bring the shorter side to `resized_side`."""
        height, width = samples.shape[2:]
        scale = self.resized_side / min(height, width)
        if scale == 1.0:
            return samples
        size = (round(height * scale), round(width * scale))
        return F.interpolate(samples.float(), size, mode="bilinear", align_corners=False, antialias=scale < 1.0)

    def _normalise(self, samples: Tensor) -> Tensor:
        mean = torch.tensor(self.mean, device=samples.device).view(1, -1, 1, 1) * 255
        std = torch.tensor(self.std, device=samples.device).view(1, -1, 1, 1) * 255
        inputs = (samples.float() - mean) / std
        return inputs.contiguous(memory_format=torch.channels_last)

    def _cut_out(self, inputs: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """Blank a square to the mean colour, which after normalisation is zero."""
        inside = []
        for size, number in zip(inputs.shape[2:], (_CUT_ROW, _CUT_COLUMN), strict=True):
            start = self._draw(size, ids, epoch, number)[:, None] - self.cutout // 2
            axis = torch.arange(size, device=inputs.device)[None]
            inside.append((axis >= start) & (axis < start + self.cutout))
        square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return inputs.masked_fill(square, 0.0)


def build_pipeline(config: DataConfig, info: DatasetInfo, seed: int) -> Pipeline:
    """The pipeline a config asks for; vectors pass through untouched."""
    kind = config.augment
    if kind == "imagenet" and not info.is_image:
        raise UserError("the imagenet pipeline needs images", got=f"{info.name} has vectors", hint="--augment none")
    if kind == "light" and info.is_image and info.sample_shape[1] != info.sample_shape[2]:
        raise UserError("the light pipeline needs square images", got=info.sample_shape, hint="--augment none")
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
