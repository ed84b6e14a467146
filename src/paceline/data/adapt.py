"""Converts the data that users have to the `Dataset` interface: arrays, tensors, map-style data sets, readers.

The same rules hold for what a data set function returns and for objects that are given to `paceline.train`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from paceline.data.dataset import Dataset, DatasetInfo, LoadedData, ResidentDataset
from paceline.data.labels import (
    RawLabels,
    as_raw_labels,
    class_names,
    encode_labels,
    no_samples,
    require_trained_labels,
)
from paceline.data.parts import PARTS, TEST, TRAIN, VALIDATION, part_named
from paceline.data.pictures import DECODER, as_rgb
from paceline.data.sample_arrays import as_samples, as_tensor, kind_of
from paceline.data.targets import as_targets, as_weights, column_names
from paceline.errors import DataError, PacelineError, UserError
from paceline.settings.tasks import SINGLE_LABEL

EXPECTED = (
    "(train, test), (train, test, classes),\nor {'train': ..., 'validation': ..., 'test': ..., 'classes': ...}, "
    "without 'validation' and 'classes' too"
)
EXPECTED_PART = (
    "(samples, labels), (samples, labels, weights), an object with read(indices) and labels, or a map-style data set"
)
_STATISTICS_SAMPLES = 1024
_CLASSES = "classes"
Transform = Callable[[Any], Any]
_LABEL_COLUMNS = ("label", "labels", "target", "class")


def parts_of(returned: Any) -> tuple[dict[str, Any], Any]:
    """The parts by name, and the classes, of what a data set function returned."""
    if isinstance(returned, Mapping):
        return _parts_of_mapping(returned), returned.get(_CLASSES)
    if isinstance(returned, tuple | list) and len(returned) in (2, 3):
        train, test, *rest = returned
        return {TRAIN: train, TEST: test}, rest[0] if rest else None
    raise UserError("the data set function returned something else", got=kind_of(returned), allowed=EXPECTED)


def _parts_of_mapping(returned: Mapping[Any, Any]) -> dict[str, Any]:
    keys = [str(key) for key in returned if key != _CLASSES]
    parts = [part_named(key) for key in keys]
    # An unknown key may be a validation set under another name. Nothing may be left out silently.
    if None in parts or len(set(parts)) < len(parts) or not {TRAIN, TEST} <= set(parts):
        raise UserError(
            "the data set function returned something else",
            got=f"a {type(returned).__name__} with {', '.join(map(repr, keys)) or 'no keys'}",
            allowed=EXPECTED,
        )
    found = {part: returned[key] for part, key in zip(parts, keys, strict=True) if part is not None}
    return {part: value for part, value in found.items() if part != VALIDATION or value is not None}


def adapt_parts(
    given: Mapping[str, Any],
    classes: Any,
    name: str,
    transform: Transform | None = None,
    *,
    task: str = SINGLE_LABEL,
) -> LoadedData:
    """All parts as data sets, checked: not empty, of one shape and type, with labels that fit the classes and the task.

    `transform` is applied to each sample whenever it is read.
    """
    opened: dict[str, _Opened] = {}
    for part in (part for part in PARTS if part in given):
        # The labels of an object that is given twice are collected once.
        same = [found for other, found in opened.items() if given[other] is given[part]]
        opened[part] = same[0] if same else _open(given[part], part, transform, task)
    if classes is None:
        classes = opened[TRAIN].classes
    if task == SINGLE_LABEL:
        names = class_names(classes, [part.labels for part in opened.values()])
        if classes is None:
            require_trained_labels({part: found.labels for part, found in opened.items()})
    else:
        names = column_names(classes, {part: found.labels.shape[1] for part, found in opened.items()}, task)
    parts = {part: found.numbered(names) for part, found in opened.items()}
    return LoadedData(describe_parts(parts, names, name, task), **parts)


def describe_parts(
    parts: Mapping[str, Dataset], names: tuple[str, ...], name: str, task: str = SINGLE_LABEL
) -> DatasetInfo:
    """The description of these parts. UserError if their samples differ in shape or type."""
    first = {part: dataset.read(torch.tensor([0]))[0] for part, dataset in parts.items()}
    sample = first[TRAIN]
    for part, other in first.items():
        if other.shape != sample.shape:
            raise UserError(
                f"train and {part} differ in sample shape", got=f"{tuple(sample.shape)} and {tuple(other.shape)}"
            )
        if other.dtype != sample.dtype:
            raise UserError(f"train and {part} differ in type", got=f"{sample.dtype} and {other.dtype}")
    # Only bytes have statistics: floats reach the model as they are.
    mean, std = _statistics(parts[TRAIN]) if sample.dtype == torch.uint8 else ((), ())
    num_validation = len(parts[VALIDATION]) if VALIDATION in parts else 0
    shape = tuple(sample.shape)
    return DatasetInfo(name, len(parts[TRAIN]), len(parts[TEST]), names, shape, mean, std, num_validation, task)


def adapt_part(
    given: Any, part: str, classes: tuple[str, ...], transform: Transform | None = None, *, task: str = SINGLE_LABEL
) -> Dataset:
    """One part for a model that has these classes."""
    opened = _open(given, part, transform, task)
    if task == SINGLE_LABEL:
        class_names(classes, [opened.labels])
    else:
        column_names(classes, {TRAIN: len(classes), part: opened.labels.shape[1]}, task)
    return opened.numbered(classes)


class _Opened:
    """A part whose labels are not numbered yet."""

    def __init__(self, labels: RawLabels | Tensor, source: Any, classes: Any, weights: Any = None) -> None:
        self.labels: Any = labels  # targets of other tasks than single-label are tensors already
        self.classes = classes
        self._source = source
        self._weights = None if weights is None else as_weights(weights, len(labels))

    def numbered(self, names: tuple[str, ...]) -> Dataset:
        labels = self.labels if isinstance(self.labels, Tensor) else encode_labels(self.labels, names)
        if isinstance(self._source, Tensor):
            return ResidentDataset(self._source, labels, self._weights)
        if isinstance(self._source, MapStyle):
            return _MapStyleDataset(self._source, labels)
        return _Reader(self._source, labels, self._weights)


def _open(given: Any, part: str, transform: Transform | None, task: str) -> _Opened:
    try:
        return _open_part(given, transform, task)
    except PacelineError as error:
        error.where = f"{part} part" + (f", {error.where}" if error.where else "")
        raise


def _open_part(given: Any, transform: Transform | None, task: str) -> _Opened:
    classes = getattr(given, "classes", None)
    if hasattr(given, "read") and hasattr(given, "labels"):
        if transform is not None:
            raise UserError("a data set with read(indices) has no transform", hint="apply it in read(indices)")
        return _Opened(_read_labels(given.labels, task), given, classes, getattr(given, "sample_weights", None))
    tensors = getattr(given, "tensors", None)  # of torch's TensorDataset
    if isinstance(tensors, tuple) and len(tensors) == 2:
        given = tensors
    if isinstance(given, tuple | list) and len(given) == 2 and transform is not None:
        given = _Pairs(*given)
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        samples, labels = as_samples(given[0]), _read_labels(given[1], task)
        if len(samples) != len(labels):
            raise UserError(
                "samples and labels differ in number", got=f"{len(samples)} samples and {len(labels)} labels"
            )
        return _Opened(labels, samples, classes, given[2] if len(given) == 3 else None)
    if is_map_style(given):
        if len(given) == 0:
            raise no_samples()
        inner = MapStyle(given, transform)
        return _Opened(_read_labels(inner.raw_labels(), task), inner, inner.classes)
    is_loader = hasattr(given, "dataset") and hasattr(given, "__iter__")
    hint = "its data set: loader.dataset" if is_loader else None
    raise UserError("this is not a data set", got=kind_of(given), allowed=EXPECTED_PART, hint=hint)


def _read_labels(values: Any, task: str) -> RawLabels | Tensor:
    if task == SINGLE_LABEL:
        return as_raw_labels(values)
    targets = as_targets(values, task)
    if not len(targets):
        raise no_samples()
    return targets


def is_map_style(given: Any) -> bool:
    """Whether it has `len(...)` and `[index]`, as data sets of torch and Hugging Face have."""
    return hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, str | bytes | Mapping)


class _Reader:
    """Wraps a user's object that has `read` and `labels`."""

    def __init__(self, inner: Any, labels: Tensor, weights: Tensor | None) -> None:
        self._inner = inner
        self.labels = labels
        self.sample_weights = weights

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Tensor) -> Tensor:
        return as_samples(self._inner.read(indices))


class _Pairs:
    """Samples and labels as a map-style data set, for a transform."""

    def __init__(self, samples: Any, labels: Any) -> None:
        if len(samples) != len(labels):
            raise UserError(
                "samples and labels differ in number", got=f"{len(samples)} samples and {len(labels)} labels"
            )
        self._samples = samples
        self.targets = labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._samples[index], self.targets[index]


def _transformed(transform: Transform, sample: Any, index: int) -> Any:
    try:
        return transform(sample)
    except PacelineError:
        raise
    except Exception as error:  # whatever the user's code raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            "the transform failed",
            where=f"sample {index}; {frame.filename}, line {frame.lineno}",
            got=f"{type(error).__name__}: {error}",
        ) from error


class MapStyle:
    """A data set with `len(...)` and `[index]`. An item is (sample, label), or a dict with a column of labels."""

    def __init__(self, inner: Any, transform: Transform | None = None) -> None:
        self._inner = inner
        self._transform = transform
        self._label_column = _label_column(inner[0])
        self.is_pictures = isinstance(self._item(0)[0], Image.Image)
        self._shape = self._sample(0).shape

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def classes(self) -> Any:
        """The class names of torchvision's data sets (`classes`) and of Hugging Face's (`features`)."""
        features = getattr(self._inner, "features", None)
        if isinstance(features, Mapping) and self._label_column is not None:
            return getattr(features.get(self._label_column), "names", None)
        return getattr(self._inner, "classes", None)

    def raw_labels(self) -> Any:
        """All labels. Without a list or column of labels, every sample is made once to get its label."""
        known = getattr(self._inner, "targets", None)
        if known is None and self._label_column in (getattr(self._inner, "column_names", None) or ()):
            known = list(self._inner[self._label_column])
        return [self._item(index)[1] for index in range(len(self))] if known is None else known

    def raw_sample(self, index: int) -> Any:
        """A sample as the data set returns it."""
        return self._item(index)[0]

    def samples(self, indices: Tensor) -> Tensor:
        return torch.stack([self._checked(index) for index in indices.tolist()])

    def _checked(self, index: int) -> Tensor:
        sample = self._sample(index)
        if sample.shape != self._shape:
            raise DataError(
                "the samples of this data set differ in shape",
                where=f"sample {index}",
                got=tuple(sample.shape),
                allowed=f"{tuple(self._shape)}, as sample 0 has",
                hint="resize the samples in your data set",
            )
        return sample

    def _sample(self, index: int) -> Tensor:
        sample = self._item(index)[0]
        if self._transform is not None:
            sample = _transformed(self._transform, sample, index)
        if isinstance(sample, Image.Image):
            sample = np.array(_as_picture(sample, index))
        return as_samples(as_tensor(sample)[None])[0]

    def _item(self, index: int) -> tuple[Any, Any]:
        item = self._inner[index]
        if self._label_column is not None and isinstance(item, Mapping) and len(item) == 2:
            (column,) = [name for name in item if name != self._label_column]
            return item[column], item[self._label_column]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(
                "an item of a map-style data set is wrong",
                where=f"dataset, item {index}",
                got=kind_of(item),
                allowed="(sample, label), or a dict of a sample and its 'label'",
                hint="samples and their labels: data=(x, y)" if isinstance(self._inner, np.ndarray | Tensor) else None,
            )
        return item[0], item[1]


def _label_column(item: Any) -> str | None:
    """The key of the label in an item that is a dict. None for a pair."""
    if not isinstance(item, Mapping):
        return None
    found = [name for name in _LABEL_COLUMNS if name in item]
    if len(item) != 2 or len(found) != 1:
        raise UserError(
            "the columns of this data set cannot be matched to sample and label",
            got=", ".join(map(repr, item)),
            allowed=f"two columns, one of them called {' or '.join(_LABEL_COLUMNS)}",
            hint="data.select_columns(['image', 'label']), after data.rename_column where the names differ",
        )
    return found[0]


class _MapStyleDataset:
    """A map-style data set with numbered labels."""

    def __init__(self, inner: MapStyle, labels: Tensor) -> None:
        if len(inner) != len(labels):
            raise UserError("samples and labels differ in number", got=f"{len(inner)} samples and {len(labels)} labels")
        self._inner = inner
        self.labels = labels
        if inner.is_pictures:
            self.decoder = DECODER

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Tensor) -> Tensor:
        return self._inner.samples(indices)


def _as_picture(image: Image.Image, index: int) -> Image.Image:
    """By the rules for all pictures. Grey ones keep one channel."""
    try:
        return as_rgb(image).convert("L" if image.mode in ("1", "L") else "RGB")
    except DataError as error:
        error.where = f"sample {index}"
        raise


def _statistics(train: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, from samples spread evenly over the set."""
    step = max(1, len(train) // _STATISTICS_SAMPLES)
    pixels = train.read(torch.arange(0, len(train), step)[:_STATISTICS_SAMPLES]).to(torch.float64) / 255
    std, mean = torch.std_mean(pixels, dim=(0, 2, 3), correction=0)
    return tuple(mean.tolist()), tuple(value or 1.0 for value in std.tolist())
