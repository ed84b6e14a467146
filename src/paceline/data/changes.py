"""A run's changes to its training samples: samples that are left out, and samples with another label."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.data.dataset import Dataset, LoadedData, ResidentDataset
from paceline.errors import UserError
from paceline.settings.samples import excluded_ids, new_labels
from paceline.settings.schema import DataConfig


class Relabelled:
    """A data set with other labels for some samples."""

    def __init__(self, dataset: Dataset, labels: Tensor) -> None:
        self._dataset = dataset
        self._labels = labels

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, indices: Tensor) -> Tensor:
        return self._dataset.read(indices)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def with_new_labels(data: LoadedData, config: DataConfig) -> LoadedData:
    """The data with the labels of `relabel`."""
    given = new_labels(config.relabel)
    if not given:
        return data
    _require_samples(list(given), len(data.train), "relabel")
    classes = data.info.classes
    labels = data.train.labels.clone()
    for sample, label in given.items():
        if label not in classes and not (label.isdecimal() and int(label) < len(classes)):
            names = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
            raise UserError("this is not a class of the data", where="relabel", got=f"{sample}={label}", allowed=names)
        labels[sample] = classes.index(label) if label in classes else int(label)
    train = data.train
    if isinstance(train, ResidentDataset):
        return replace(data, train=ResidentDataset(train.samples, labels, train.sample_weights))
    return replace(data, train=Relabelled(train, labels))


def excluded_samples(data: LoadedData, config: DataConfig, train_ids: Tensor) -> Tensor:
    """The numbers of the samples that are left out. They exist, and some of `train_ids` are left."""
    ids = excluded_ids(config.exclude)
    _require_samples(ids, len(data.train), "exclude")
    excluded = torch.tensor(ids, dtype=torch.int64)
    if bool(torch.isin(train_ids, excluded).all()):
        raise UserError("no training sample is left", where="exclude", got=f"all {len(train_ids)} are excluded")
    return excluded


def changed_samples(one: DataConfig, other: DataConfig) -> list[int]:
    """Samples that the two configs do not use in the same way."""
    out = set(excluded_ids(one.exclude)) ^ set(excluded_ids(other.exclude))
    labels = set(new_labels(one.relabel).items()) ^ set(new_labels(other.relabel).items())
    return sorted(out | {sample for sample, _ in labels})


def _require_samples(ids: list[int], count: int, where: str) -> None:
    missing = [number for number in ids if number >= count]
    if missing:
        raise UserError(
            "these training samples do not exist",
            where=where,
            got=", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else ""),
            allowed=f"0 to {count - 1}",
        )
