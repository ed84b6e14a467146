"""Data as objects: arrays, tensors and map-style data sets that are given to `paceline.train`.

They are converted and checked in this process. `run_inputs.py` writes them for the ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.adapt import Transform, adapt_part, adapt_parts, describe_parts, parts_of
from paceline.data.array_folder import ARRAYS, ArrayHeader
from paceline.data.dataset import Dataset, LoadedData
from paceline.data.order import split_train_test
from paceline.data.parts import TEST, TRAIN, VALIDATION
from paceline.data.picture_folder import TEST_ONE_IN
from paceline.data.sources.arrays import chunks, header_of, require_finite
from paceline.data.sources.custom import call_function
from paceline.errors import PacelineError, UserError
from paceline.settings.schema import Config
from paceline.settings.tasks import SINGLE_LABEL
from paceline.tools.doctor.machine import gather_memory

_SPARE_BYTES = 100_000_000  # of the disk, for checkpoints and logs


@dataclass(frozen=True)
class DataObjects:
    """The data of a call, converted to the `Dataset` interface."""

    data: LoadedData
    header: ArrayHeader

    @property
    def size_bytes(self) -> int:
        one = self.data.train.read(torch.tensor([0]))
        return one.nbytes * sum(len(part) for _, part in self.data.parts())

    def require_space(self, folder: Path) -> None:
        """UserError if the data does not fit into memory, or onto the disk of this folder."""
        memory = gather_memory()
        known = [value for value in (memory.total_bytes, memory.limit_bytes) if value]
        limit = min(known, default=None)  # None where the system does not say
        if limit is not None and self.size_bytes > limit:
            raise UserError(
                "the data is larger than the memory of this machine",
                where="paceline.train(data=...)",
                got=f"{self.size_bytes / 1e9:,.2f} GB of samples, {limit / 1e9:,.2f} GB of memory",
                hint="a data set function whose parts have read(indices), or a folder of pictures: paceline data pack",
            )
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free_bytes = shutil.disk_usage(nearest).free
        if self.size_bytes + _SPARE_BYTES > free_bytes:
            raise UserError(
                "there is not enough disk space for the data",
                where=str(folder),
                got=f"{free_bytes / 1e9:,.2f} GB free, {self.size_bytes / 1e9:,.2f} GB of samples",
                hint="output_dir on another disk",
            )


def read_objects(
    data: Any,
    validation: Any = None,
    test: Any = None,
    classes: Any = None,
    transform: Transform | None = None,
    *,
    task: str = SINGLE_LABEL,
) -> DataObjects:
    """`data` is the training part, or a dict of all parts as a data set function returns it."""
    if transform is not None and not callable(transform):
        raise UserError("transform is not a function", where="paceline.train(transform=...)", got=repr(transform))
    given: dict[str, Any] = {TRAIN: data}
    if isinstance(data, Mapping):
        given, own = _parts_of_dict(data)
        classes = own if classes is None else classes
    for name, part in ((VALIDATION, validation), (TEST, test)):
        if part is not None and name in given:
            raise UserError(f"{name} is given twice", where="paceline.train", got=f"data[{name!r}] and {name}=")
        if part is not None:
            given[name] = part
    return _converted(given, classes, transform, task)


def read_test_objects(
    data: Any, classes: tuple[str, ...], transform: Transform | None, *, task: str = SINGLE_LABEL
) -> Dataset:
    """Data to evaluate a run on that has these classes and this task."""
    try:
        part = adapt_part(data, TEST, classes, transform, task=task)
        for ids in chunks(part):
            require_finite(part.read(ids), ids, TEST)
    except PacelineError as error:
        error.where = f"run.evaluate(data), {error.where}" if error.where else "run.evaluate(data)"
        raise
    return part


def _parts_of_dict(data: Mapping[Any, Any]) -> tuple[dict[str, Any], Any]:
    """Like the result of a data set function, but the test part may be absent."""
    try:
        absent = {} if any(str(key).lower() == TEST for key in data) else {TEST: None}
        given, classes = parts_of({**data, **absent})
    except UserError as error:
        error.what, error.where = "these are not the parts of a data set", "paceline.train(data=...)"
        raise
    return {name: part for name, part in given.items() if part is not None}, classes


def call_for_objects(
    function: Callable[..., Any], config: Config, *, classes: Any = None, transform: Transform | None = None
) -> DataObjects:
    """Call a data set function that ranks cannot import, in this process. The config has the task."""
    returned = call_function(function, config.data, config.train.seed)
    given, own = parts_of(returned)
    return _converted(given, own if classes is None else classes, transform, config.data.task)


def _converted(given: dict[str, Any], classes: Any, transform: Transform | None, task: str) -> DataObjects:
    is_test_held_out = TEST not in given
    if any(isinstance(part, tuple | list) and len(part) == 3 for part in given.values()):
        raise UserError(
            "sample weights are not taken with arrays",
            where="paceline.train(data=...)",
            got="(x, y, weights)",
            allowed="(x, y)",
            hint="a function in a file that returns (x, y, weights) for each part, and sampling='weighted'",
        )
    try:
        # The held-out part is cut off below. Until then the training part takes its place.
        loaded = adapt_parts({TEST: given[TRAIN], **given}, classes, ARRAYS, transform, task=task)
    except PacelineError as error:
        error.where = f"paceline.train(data=...), {error.where}" if error.where else "paceline.train(data=...)"
        error.hint = _hint_for(given[TRAIN]) or error.hint
        raise
    if is_test_held_out:
        loaded = _hold_out_test(loaded)
    return DataObjects(loaded, header_of(loaded, is_test_held_out=is_test_held_out))


def _hint_for(train: Any) -> str | None:
    """For `data=((x, y), (x_test, y_test))`."""
    is_nested = isinstance(train, tuple | list) and len(train) == 2
    is_nested = is_nested and all(isinstance(item, tuple | list) and len(item) == 2 for item in train)
    return "data=(x, y), test=(x_test, y_test)" if is_nested else None


def _hold_out_test(loaded: LoadedData) -> LoadedData:
    train, test = split_train_test(len(loaded.train), TEST_ONE_IN)
    if not len(test):
        raise UserError(
            "there are too few samples to hold out a test set",
            where="paceline.train(data=...)",
            got=f"{len(loaded.train)} samples",
            allowed=f"{TEST_ONE_IN} or more, or test=(x_test, y_test)",
        )
    parts: dict[str, Dataset] = {TRAIN: _Subset(loaded.train, train), TEST: _Subset(loaded.train, test)}
    if loaded.validation is not None:
        parts[VALIDATION] = loaded.validation
    return LoadedData(describe_parts(parts, loaded.info.classes, ARRAYS, loaded.info.task), **parts)


class _Subset:
    """Some samples of a data set."""

    def __init__(self, inner: Dataset, ids: Tensor) -> None:
        self._inner = inner
        self._ids = ids
        self.labels = inner.labels[ids]

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, indices: Tensor) -> Tensor:
        return self._inner.read(self._ids[indices])

    def ids_in_data(self, indices: Tensor) -> Tensor:
        """The numbers of these samples in the user's data."""
        return self._ids[indices]
