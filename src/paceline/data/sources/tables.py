"""Pictures that CSV files list, with one label, several labels or numbers each (`data/picture_table.py`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.data.dataset import DatasetInfo, LoadedData
from paceline.data.encoded import EncodedDataset, encoded_dataset
from paceline.data.pack_format import picture_side
from paceline.data.picture_files import PictureFiles
from paceline.data.picture_set import picture_info
from paceline.data.picture_table import Listed, PictureTable, read_tables
from paceline.errors import DataError
from paceline.settings.resolution import largest_size
from paceline.settings.schema import DataConfig
from paceline.settings.tasks import REGRESSION, SINGLE_LABEL


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return _info(read_tables(Path(config.data_dir), config.task), config)


def load(config: DataConfig, seed: int) -> LoadedData:
    table = read_tables(Path(config.data_dir), config.task)
    info = _info(table, config)
    return LoadedData(info, **{part: _dataset(table, part, info, config) for part in table.parts})


def _dataset(table: PictureTable, part: str, info: DatasetInfo, config: DataConfig) -> EncodedDataset:
    listed = table.parts[part]
    return encoded_dataset(
        PictureFiles(table.root, [item.path for item in listed]),
        _labels(listed, table.classes, config.task),
        info.sample_shape[-1],
        config,
        sample_weights=_weights(listed),
    )


def _info(table: PictureTable, config: DataConfig) -> DatasetInfo:
    sizes = {part: len(listed) for part, listed in table.parts.items()}
    info = picture_info(table.classes, sizes, picture_side(largest_size(config)), table.files)
    return replace(info, name="csv", task=config.task)


def _labels(listed: list[Listed], classes: tuple[str, ...], task: str) -> Tensor:
    if task == REGRESSION:
        return torch.tensor([[float(text) for text in item.labels] for item in listed])
    numbers = {name: number for number, name in enumerate(classes)}
    if task == SINGLE_LABEL:
        return torch.tensor([numbers[item.labels[0]] for item in listed])
    labels = torch.zeros(len(listed), len(classes))
    for row, item in enumerate(listed):
        labels[row, [numbers[label] for label in item.labels]] = 1.0
    return labels


def _weights(listed: list[Listed]) -> Tensor | None:
    if all(item.weight is None for item in listed):
        return None
    for item in listed:
        if item.weight is None:
            raise DataError("a picture has no weight, and others have one", where=item.where)
    return torch.tensor([item.weight for item in listed], dtype=torch.float64)
