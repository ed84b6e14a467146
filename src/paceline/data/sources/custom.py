"""The user's own data set: the function `FILE.py:FUNCTION` or `package.module:FUNCTION`.

It may take any of `data_dir`, `seed` and `config`. It returns the train and test parts as a pair, a triple with the
classes, or a dict, which may have a validation part too. A part is an object with `read` and `labels`, a pair of
arrays, a triple with a weight of each sample, or a map-style torch data set. Each is converted here to the `Dataset`
interface. The task decides on the labels: a class per sample, 0 or 1 for each class, or numbers.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from paceline.data.dataset import MOST_CLASSES, Dataset, DatasetInfo, LoadedData, ResidentDataset
from paceline.data.parts import PARTS, TEST, TRAIN, VALIDATION, part_named
from paceline.data.picture_table import number_names
from paceline.data.pictures import DECODER, as_rgb
from paceline.data.reference import resolve_reference
from paceline.errors import DataError, PacelineError, UserError, text_of
from paceline.runs.local_code import local_modules_compiled
from paceline.runs.user_code import process_kept
from paceline.settings.schema import DataConfig
from paceline.settings.tasks import REGRESSION, SINGLE_LABEL
from paceline.settings.text import check_text

EXPECTED = (
    "(train, test), (train, test, classes),\nor {'train': ..., 'validation': ..., 'test': ..., 'classes': ...}, "
    "without 'validation' and 'classes' too"
)
EXPECTED_PART = (
    "(samples, labels), (samples, labels, weights), an object with read(indices) and labels, or a map-style data set"
)
EXPECTED_SAMPLE = "uint8 images with 1 or 3 channels (CHW or HWC), or vectors of floats"
_STATISTICS_SAMPLES = 1024
_CLASSES = "classes"


class _Reader:
    """Wraps a user's object that has `read` and `labels`."""

    def __init__(self, inner: Any, task: str) -> None:
        self._inner = inner
        self._labels = _as_labels(inner.labels, task)
        weights = getattr(inner, "sample_weights", None)
        self.sample_weights = None if weights is None else _as_weights(weights, len(self._labels))

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, indices: Tensor) -> Tensor:
        return _as_samples(self._inner.read(indices))


class _MapStyle:
    """Wraps a data set with `len(...)` and `[index] -> (sample, label)`; stacks the samples."""

    def __init__(self, inner: Any, task: str) -> None:
        self._inner = inner
        known = getattr(inner, "targets", None)
        # Without a list of labels, every sample is made once to get its label.
        given = [_plain(self._item(i)[1]) for i in range(len(inner))] if known is None else known
        self._labels = _as_labels(given, task)
        self._shape = self._sample(0).shape
        if isinstance(self._item(0)[0], Image.Image):
            self.decoder = DECODER

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, indices: Tensor) -> Tensor:
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
        if isinstance(sample, Image.Image):
            sample = np.array(_as_picture(sample, index))
        return _as_samples(_tensor(sample)[None])[0]

    def _item(self, index: int) -> tuple[Any, Any]:
        item = self._inner[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(
                "an item of a map-style data set is wrong",
                where=f"dataset, item {index}",
                got=_kind(item),
                allowed="(sample, label)",
            )
        return item[0], item[1]


def _as_picture(image: Image.Image, index: int) -> Image.Image:
    """By the rules for all pictures. Grey ones keep one channel."""
    try:
        return as_rgb(image).convert("L" if image.mode in ("1", "L") else "RGB")
    except DataError as error:
        error.where = f"sample {index}"
        raise


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return load(config, seed).info


@lru_cache(maxsize=1)  # describe and load together call the user's function once
def load(config: DataConfig, seed: int) -> LoadedData:
    function = resolve_reference(config.dataset, where="dataset")
    returned = _call(function, config, seed)
    try:
        return _adapt(returned, config.dataset, config.task)
    except PacelineError as error:
        error.where = f"{config.dataset}, {error.where}" if error.where else config.dataset
        raise


def _call(function: Callable[..., Any], config: DataConfig, seed: int) -> Any:
    """Pass the parameters that the function names. An error inside it is reported with its own line."""
    offered = {"data_dir": config.data_dir, "seed": seed, "config": config}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        wanted = offered
    else:
        wanted = {p.name: offered[p.name] for p in parameters if p.name in offered}
    unknown = [p.name for p in parameters if p.name not in wanted and _is_required(p)]
    if unknown:
        raise UserError(
            "the data set function has unknown parameters",
            where=config.dataset,
            got=", ".join(unknown),
            allowed=", ".join(offered),
        )
    try:
        with local_modules_compiled(), process_kept():
            return function(**wanted)
    except PacelineError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"the data set function {config.dataset} failed",
            where=f"{frame.filename}, line {frame.lineno}",
            got=f"{type(error).__name__}: {text_of(error)}",
        ) from error


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not variadic


def _adapt(returned: Any, name: str, task: str) -> LoadedData:
    given, classes = _parts(returned)
    parts = {part: _part(given[part], part, task) for part in PARTS if part in given}
    shapes = {part: tuple(dataset.read(torch.tensor([0])).shape[1:]) for part, dataset in parts.items()}
    shape = shapes[TRAIN]
    for part, other in shapes.items():
        if other != shape:
            raise UserError(f"train and {part} differ in sample shape", got=f"{shape} and {other}")
    if classes is None:
        classes = getattr(given[TRAIN], "classes", None)
    if task == SINGLE_LABEL:
        names = _class_names(classes, torch.cat([dataset.labels for dataset in parts.values()]).unique().tolist())
    else:
        names = _column_names(classes, {part: dataset.labels.shape[1] for part, dataset in parts.items()}, task)
    mean, std = _statistics(parts[TRAIN]) if len(shape) == 3 else ((), ())
    num_validation = len(parts[VALIDATION]) if VALIDATION in parts else 0
    info = DatasetInfo(name, len(parts[TRAIN]), len(parts[TEST]), names, shape, mean, std, num_validation, task)
    return LoadedData(info, **parts)


def _parts(returned: Any) -> tuple[dict[str, Any], Any]:
    """The parts by name, and the classes."""
    if isinstance(returned, Mapping):
        return _parts_of_mapping(returned), returned.get(_CLASSES)
    if isinstance(returned, tuple | list) and len(returned) in (2, 3):
        train, test, *rest = returned
        return {TRAIN: train, TEST: test}, rest[0] if rest else None
    raise UserError("the data set function returned something else", got=_kind(returned), allowed=EXPECTED)


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


def _part(given: Any, part: str, task: str) -> Dataset:
    """One part as a `Dataset`, checked: not empty, no negative labels."""
    try:
        dataset = _fitted(given, task)
        if len(dataset) == 0:
            raise UserError("there are no samples", allowed="at least one")
        if task != REGRESSION and dataset.labels.min() < 0:
            raise UserError("a label is negative", got=int(dataset.labels.min()), allowed="0, 1, 2, ...")
        return dataset
    except PacelineError as error:
        error.where = f"{part} part" + (f", {error.where}" if error.where else "")
        raise


def _fitted(given: Any, task: str) -> Dataset:
    if hasattr(given, "read") and hasattr(given, "labels"):
        return _Reader(given, task)
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        samples, labels = _as_samples(_tensor(given[0])), _as_labels(given[1], task)
        if len(samples) != len(labels):
            raise UserError(
                "samples and labels differ in number", got=f"{len(samples)} samples and {len(labels)} labels"
            )
        return ResidentDataset(samples, labels, _as_weights(given[2], len(labels)) if len(given) == 3 else None)
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, str | Mapping):
        if len(given) == 0:
            raise UserError("there are no samples", allowed="at least one")
        return _MapStyle(given, task)
    raise UserError("this is not a data set", got=_kind(given), allowed=EXPECTED_PART)


def _tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        return torch.from_numpy(np.array(values))  # a copy: the user's array may be read-only
    except (TypeError, ValueError) as error:
        raise UserError("this is not an array of numbers", got=_kind(values), allowed=EXPECTED_SAMPLE) from error


def _as_samples(batch: Any) -> Tensor:
    """uint8 [B, C, H, W] or float32 [B, D], from the usual layouts."""
    tensor = _tensor(batch).cpu()
    if tensor.dtype.is_floating_point and tensor.ndim == 2:
        return tensor.to(torch.float32)
    if tensor.dtype == torch.uint8 and tensor.ndim == 3:
        return tensor[:, None]
    if tensor.dtype == torch.uint8 and tensor.ndim == 4:
        if tensor.shape[1] in (1, 3):
            return tensor
        if tensor.shape[3] in (1, 3):
            return tensor.permute(0, 3, 1, 2).contiguous()
    is_float_image = tensor.dtype.is_floating_point and tensor.ndim in (3, 4)
    raise UserError(
        "samples of this kind cannot be trained on",
        got=f"{tensor.dtype} of shape {tuple(tensor.shape[1:])} per sample",
        allowed=EXPECTED_SAMPLE,
        hint="return images as uint8 from 0 to 255; scaling is done on the device" if is_float_image else None,
    )


def _as_labels(values: Any, task: str) -> Tensor:
    """int64 [N] for classes; float32 [N, columns] for other tasks."""
    labels = _tensor(values).cpu()
    if task == SINGLE_LABEL:
        if labels.ndim != 1 or labels.dtype.is_floating_point or labels.dtype.is_complex:
            _wrong_labels(labels, "one whole number per sample, counted from 0")
        return labels.to(torch.int64)
    if task == REGRESSION:
        if labels.ndim not in (1, 2) or labels.dtype.is_complex or not bool(labels.isfinite().all()):
            _wrong_labels(labels, "one finite number per sample, or a row of them")
        return labels.float().reshape(len(labels), -1)
    if labels.ndim != 2 or labels.dtype.is_complex or not bool(((labels == 0) | (labels == 1)).all()):
        _wrong_labels(labels, "a row of 0 and 1 per sample, one for each class")
    return labels.float()


def _wrong_labels(labels: Tensor, allowed: str) -> NoReturn:
    raise UserError(
        "labels of this kind cannot be trained on",
        got=f"{labels.dtype} of shape {tuple(labels.shape)}",
        allowed=allowed,
    )


def _plain(label: Any) -> Any:
    """The label of an item, so that many of them form an array."""
    return label.tolist() if isinstance(label, Tensor) else label


def _as_weights(values: Any, count: int) -> Tensor:
    weights = _tensor(values).cpu()
    if weights.shape != (count,) or weights.dtype.is_complex:
        raise UserError(
            "sample weights of this kind cannot be used",
            got=f"{weights.dtype} of shape {tuple(weights.shape)}",
            allowed=f"one number per sample, shape ({count},)",
        )
    return weights.double()


def _column_names(classes: Any, columns: dict[str, int], task: str) -> tuple[str, ...]:
    """Of several labels: the classes. Of a regression: its numbers. `columns`: how many the parts' labels have."""
    count, least = columns[TRAIN], 1 if task == REGRESSION else 2
    if count < least or any(other != count for other in columns.values()):
        raise UserError(
            "the labels have a wrong number of columns",
            got=", ".join(f"{part}: {number}" for part, number in columns.items()),
            allowed=f"{least} or more, the same in every part",
        )
    if classes is None or classes == count:
        return number_names(count) if task == REGRESSION else tuple(map(str, range(count)))
    if isinstance(classes, str) or not isinstance(classes, Sequence) or len(classes) != count:
        raise UserError("the class names do not fit the labels", got=repr(classes), allowed=f"{count} names in a list")
    return tuple(check_text(str(name), "the name of a class", where="class names") for name in classes)


def _class_names(classes: Any, labels: list[int]) -> tuple[str, ...]:
    """`classes`: their names, their number, or None. `labels`: those that occur, ascending."""
    num_labels = labels[-1] + 1
    if num_labels > MOST_CLASSES:
        raise UserError(
            "a label is too large", got=labels[-1], allowed=f"0 to {MOST_CLASSES - 1:,}: one number per class"
        )
    if classes is None:
        if labels != list(range(num_labels)):
            _leave_gaps(labels)
        return tuple(str(label) for label in range(max(2, num_labels)))
    if isinstance(classes, int) and not isinstance(classes, bool) and max(2, num_labels) <= classes <= MOST_CLASSES:
        return tuple(str(label) for label in range(classes))
    if isinstance(classes, str) or not isinstance(classes, Sequence) or len(classes) < max(2, num_labels):
        raise UserError(
            "the class names do not fit the labels",
            got=repr(classes),
            allowed=f"at least {max(2, num_labels)} names in a list, or the number of classes",
        )
    return tuple(check_text(str(name), "the name of a class", where="class names") for name in classes)


def _leave_gaps(labels: list[int]) -> NoReturn:
    """A class without samples is an error in the labels, unless the user says how many classes there are."""
    shown = ", ".join(map(str, labels[:12])) + (", ..." if len(labels) > 12 else "")
    raise UserError(
        "the labels leave out numbers",
        got=f"{len(labels)} different labels from {labels[0]} to {labels[-1]}: {shown}",
        allowed=f"0 to {len(labels) - 1} for {len(labels)} classes",
        hint="number them without gaps: np.unique(labels, return_inverse=True)[1];\n"
        f"or state the classes, if some have no samples: return train, test, {labels[-1] + 1}",
    )


def _statistics(train: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, from samples spread evenly over the set."""
    step = max(1, len(train) // _STATISTICS_SAMPLES)
    pixels = train.read(torch.arange(0, len(train), step)[:_STATISTICS_SAMPLES]).to(torch.float64) / 255
    std, mean = torch.std_mean(pixels, dim=(0, 2, 3), correction=0)
    return tuple(mean.tolist()), tuple(value or 1.0 for value in std.tolist())


def _kind(value: Any) -> str:
    length = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{length}"
