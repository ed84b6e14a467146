"""What a sample becomes in an epoch, as pixels: the loader's own steps for one pair of samples.

For pages and documentation. The pixels are those of training, on any number of ranks.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from paceline.data.ahead import read_samples
from paceline.data.augment import Pipeline
from paceline.data.dataset import Dataset
from paceline.data.order import samples_of


@dataclass(frozen=True)
class TrainingInput:
    """One sample in one epoch."""

    pixels: Tensor  # uint8 [C, H, W]
    target: Tensor  # a class, the shares of classes, or the numbers of a regression
    partner: int | None  # the id of the sample it is mixed with


def training_inputs(
    dataset: Dataset, pipeline: Pipeline, batches: Tensor, sample: int, epoch: int
) -> list[TrainingInput]:
    """The inputs that a model gets for a sample, one per repeat. Empty if the epoch's `batches` leave it out."""
    keys = batches.flatten()
    return [_input_at(dataset, pipeline, keys, int(place), epoch) for place in (samples_of(keys) == sample).nonzero()]


def _input_at(dataset: Dataset, pipeline: Pipeline, keys: Tensor, place: int, epoch: int) -> TrainingInput:
    first, own = place - place % 2, place % 2
    pair = keys[first : first + 2]  # mixing needs both; shares of ranks are even then
    keys_of_epoch = pipeline.keys_of(epoch)
    ids, drawn = samples_of(pair), pipeline.draw(pair, keys_of_epoch)
    inputs = pipeline.in_epoch(epoch).augment(read_samples(dataset, ids, pipeline.crops(pair, epoch)), drawn)
    inputs, targets = pipeline.mix(inputs, dataset.labels[ids], drawn)
    pixels = to_pixels(inputs[own : own + 1], pipeline)[0]
    is_mixed = pipeline.extras.mixing is not None and bool(keys_of_epoch[-2])
    return TrainingInput(pixels, targets[own], int(ids[1 - own]) if is_mixed else None)


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
