"""What a sample becomes in an epoch, as pixels: the loader's own steps for one pair of samples.

For pages and documentation. The pixels are those of training, on any number of ranks.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from paceline.data.augment import Pipeline
from paceline.data.dataset import Dataset


@dataclass(frozen=True)
class TrainingInput:
    """One sample in one epoch."""

    pixels: Tensor  # uint8 [C, H, W]
    shares: Tensor  # of each class in its target
    partner: int | None  # the id of the sample it is mixed with


def training_input(
    dataset: Dataset, pipeline: Pipeline, batches: Tensor, sample: int, epoch: int
) -> TrainingInput | None:
    """The input that a model gets for a sample. None if the epoch's `batches` leave the sample out."""
    order = batches.flatten()
    places = (order == sample).nonzero().flatten()
    if not len(places):
        return None
    place = int(places[0])
    pair = order[[place - place % 2, place - place % 2 + 1]]  # mixing needs both; shares of ranks are even then
    drawn = pipeline.draw(pair, pipeline.keys_of(epoch))
    inputs = pipeline.augment(dataset.read(pair), drawn)
    inputs, targets = pipeline.mix(inputs, dataset.labels[pair], drawn)
    own = place % 2
    if targets.dim() == 1:
        shares = torch.nn.functional.one_hot(targets, int(dataset.labels.max()) + 1).float()
        return TrainingInput(to_pixels(inputs[own : own + 1], pipeline)[0], shares[own], None)
    return TrainingInput(to_pixels(inputs[own : own + 1], pipeline)[0], targets[own], int(pair[1 - own]))


def to_pixels(inputs: Tensor, pipeline: Pipeline) -> Tensor:
    """Undo the normalisation: model inputs to uint8 pictures [B, C, H, W]."""
    mean, std = (inputs.new_tensor(values).view(1, -1, 1, 1) for values in (pipeline.mean, pipeline.std))
    return ((inputs.float() * std + mean) * 255).round().clamp(0, 255).byte().cpu()


def to_image(picture: Tensor) -> Image.Image:
    """uint8 [C, H, W] with 1 or 3 channels."""
    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])


def as_png(image: Image.Image, largest_side: int) -> bytes:
    """A PNG file whose sides have at most `largest_side` pixels."""
    image.thumbnail((largest_side, largest_side))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
