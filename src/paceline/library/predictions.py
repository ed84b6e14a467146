"""Loads the model of a run, and classifies pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from paceline.data.adapt import MapStyle, Transform, is_map_style
from paceline.data.dataset import DatasetInfo
from paceline.data.pictures import read_pixels, square_pixels
from paceline.data.sample_arrays import as_samples, as_tensor
from paceline.data.sources.arrays import require_finite
from paceline.errors import UserError
from paceline.settings.schema import Config
from paceline.settings.tasks import LABEL_THRESHOLD, MULTI_LABEL, REGRESSION
from paceline.training.evaluate import average_over_views
from paceline.training.model_record import ModelRecord
from paceline.training.reuse import find_saved, require_same_samples
from paceline.training.scores import as_answers

Picture = str | Path | Image.Image


class IndexedSamples(Protocol):
    """A map-style data set; its labels are not used."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


Images = IndexedSamples | Picture | Tensor | np.ndarray[Any, Any] | Sequence[Picture | Tensor | np.ndarray[Any, Any]]
_EXPECTED = "paths, PIL images, or uint8 arrays [N, C, H, W] or [N, H, W, C] of 1 or 3 channels, with or without N"
_AT_ONCE = 256


@dataclass(frozen=True, repr=False)
class Prediction:
    """The answer for one image. A regression has `values`, and the other tasks have the rest."""

    label: str  # the likeliest class
    probability: float
    probabilities: dict[str, float]  # of every class
    labels: tuple[str, ...] = ()  # of a multi-label run: all labels of the image, the likeliest first
    values: dict[str, float] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        if self.values:
            return f"Prediction({', '.join(f'{name}={value:.4g}' for name, value in self.values.items())})"
        labels = f", labels={self.labels}" if self.labels else ""
        return f"Prediction({self.label!r}, {self.probability:.1%}{labels})"


@dataclass(frozen=True)
class OpenModel:
    """A model with its weights, on the CPU, and what it needs for predictions."""

    model: nn.Module
    config: Config
    record: ModelRecord


def open_model(path: Path, checkpoint: str | int, *, trust_code: bool = False) -> OpenModel:
    saved = find_saved(path, [], checkpoint=checkpoint, trust_code=trust_code)
    return OpenModel(saved.record.load_model(saved.checkpoint), saved.config, saved.record)


@torch.no_grad()
def predict_logits(opened: OpenModel, images: Images, transform: Transform | None = None) -> Tensor:
    """The model's outputs [N, classes]. Images are prepared like the samples in the run's evaluation."""
    record, views = opened.record, opened.config.train.test_views
    samples = _as_samples(images, record.info, transform)
    with record.forward_explained(opened.model):
        parts = [
            average_over_views(opened.model, record.pipeline.for_evaluation(part), views).float()
            for part in samples.split(_AT_ONCE)
            if len(part)
        ]
    return torch.cat(parts) if parts else torch.empty(0, record.info.num_classes)


def predict(opened: OpenModel, images: Images, transform: Transform | None = None) -> list[Prediction]:
    """The most likely class of each image and the probabilities of all classes, or the values of a regression."""
    task, classes = opened.record.info.task, opened.record.info.classes
    predictions = []
    outputs = predict_logits(opened, images, transform)
    _require_finite_outputs(outputs)
    for row in as_answers(task, outputs).tolist():
        named = dict(zip(classes, row, strict=True))
        if task == REGRESSION:
            predictions.append(Prediction("", math.nan, {}, values=named))
            continue
        ranked = sorted(classes, key=lambda name, values=named: -values[name])  # type: ignore[misc]
        labels = tuple(name for name in ranked if named[name] > LABEL_THRESHOLD) if task == MULTI_LABEL else ()
        predictions.append(Prediction(ranked[0], named[ranked[0]], named, labels))
    return predictions


def _require_finite_outputs(outputs: Tensor) -> None:
    """No class is the likeliest of outputs that are not numbers."""
    is_bad = ~outputs.isfinite().all(1)
    if bool(is_bad.any()):
        raise UserError(
            "the outputs of the model are not finite numbers",
            where=f"sample {int(is_bad.int().argmax())}",
            got=f"{int(is_bad.sum())} of {len(outputs)} samples",
            hint="run.predict(..., logits=True) returns them; are the values of the sample far from the training data?",
        )


def _as_samples(images: Any, info: DatasetInfo, transform: Transform | None) -> Tensor:
    """Images in the shape of the run's samples. Pictures of other sizes are cropped to their central square."""
    is_array = isinstance(images, Tensor | np.ndarray)
    if not isinstance(images, Sequence | Image.Image | Path) and not is_array and is_map_style(images):
        pairs = MapStyle(images)
        images = [pairs.raw_sample(index) for index in range(len(pairs))]
    if transform is not None:
        images = [transform(image) for image in _one_by_one(images)]
    elif is_array:
        images = _with_batch_dimension(images, info)
    if not info.takes_pictures:
        return _as_arrays(images, info)
    shape = info.sample_shape
    prepared = [_as_sample(image, shape) for image in _one_by_one(images)]
    return torch.stack(prepared) if prepared else torch.empty(0, *shape, dtype=torch.uint8)


def _with_batch_dimension(array: Any, info: DatasetInfo) -> Any:
    """A batch of samples, also of one sample that was taken out of its batch, such as x[0]."""
    shape, (channels, *sides) = tuple(array.shape), info.sample_shape
    if not sides:
        return array[None] if shape == (channels,) else array
    if channels == 1 and list(shape[1:]) == sides:
        return array[:, None]  # grey images [N, H, W], as in the training data
    if len(shape) == 2:
        return array[None, None]
    is_sample = info.takes_pictures or shape in (info.sample_shape, (*sides, channels))
    return array[None] if len(shape) == 3 and is_sample else array


def _as_arrays(images: Any, info: DatasetInfo) -> Tensor:
    """Samples of a run on floats, or on uint8 images that are not pictures: of its shape and type."""
    if isinstance(images, str | Path | Image.Image):
        raise UserError("this run was not trained on pictures", got=f"samples of shape {info.sample_shape}")
    if isinstance(images, Sequence):
        if not len(images):
            return torch.empty(0, *info.sample_shape)
        images = torch.stack([as_tensor(image) for image in images])
    vectors = as_tensor(images)
    samples = vectors.float() if len(info.sample_shape) == 1 and vectors.ndim == 2 else as_samples(images)
    require_same_samples(samples, info)
    require_finite(samples, torch.arange(len(samples)), "given")
    return samples


def _one_by_one(images: Any) -> Iterator[Any]:
    if isinstance(images, str | Path | Image.Image):
        yield images
    elif isinstance(images, Tensor | np.ndarray):
        if images.ndim < 2:
            raise UserError("these are not images", got=f"an array of shape {tuple(images.shape)}", allowed=_EXPECTED)
        yield from images
    elif isinstance(images, Sequence):
        yield from images
    else:
        raise UserError("these are not images", got=f"a {type(images).__name__}", allowed=_EXPECTED)


def _as_sample(image: Any, shape: tuple[int, ...]) -> Tensor:
    if isinstance(image, str | Path):
        if not Path(image).is_file():
            raise UserError("there is no such picture", got=str(image))
        pixels = torch.from_numpy(np.array(read_pixels(Path(image), shape[1])))
    elif isinstance(image, Image.Image):
        pixels = torch.from_numpy(np.array(square_pixels(image, shape[1])))
    else:
        pixels = _channels_first(image)
        if pixels.shape[1:] != shape[1:]:
            colours = pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
            pixels = torch.from_numpy(np.array(square_pixels(Image.fromarray(colours), shape[1])))
    if shape[0] == 1 and len(pixels) == 3:
        return pixels.float().mean(0, keepdim=True).round().to(torch.uint8)
    return pixels.expand(shape)


def _channels_first(image: Any) -> Tensor:
    pixels = torch.as_tensor(image).cpu()
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.dtype == torch.uint8 and pixels.ndim == 3:
        if len(pixels) in (1, 3):
            return pixels
        if pixels.shape[2] in (1, 3):
            return pixels.permute(2, 0, 1)
    raise UserError(
        "this is not an image",
        got=f"{pixels.dtype} of shape {tuple(pixels.shape)}",
        allowed=_EXPECTED,
        hint="images are uint8 from 0 to 255" if pixels.dtype.is_floating_point else None,
    )
