"""Pictures in tar, zip and parquet files (`data/archives`), decoded in threads by `data/encoded.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from paceline.data.archives.opened import OpenedArchives, open_archives
from paceline.data.dataset import DatasetInfo, LoadedData, Windows
from paceline.data.encoded import encoded_dataset
from paceline.data.pack_format import picture_side
from paceline.data.parts import TRAIN
from paceline.data.picture_set import labels_of, picture_info
from paceline.settings.resolution import largest_size
from paceline.settings.schema import DataConfig


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return _info(open_archives(config), config)


def load(config: DataConfig, seed: int) -> LoadedData:
    opened = open_archives(config)
    info = _info(opened, config)
    parts = {}
    for name, part in opened.catalog.parts.items():
        labels, side = labels_of(part.per_class), info.sample_shape[-1]
        parts[name] = encoded_dataset(opened.pictures(name), labels, side, config)
    parts[TRAIN].windows = _windows(opened)
    return LoadedData(info, **parts)


def _windows(opened: OpenedArchives) -> Windows | None:
    """None: all training samples are shuffled together."""
    size = opened.window()
    if not size:
        return None
    files = torch.from_numpy(opened.catalog.parts[TRAIN].columns["files"].astype("int64"))
    return Windows(files.unique(return_inverse=True)[1], size)


def _info(opened: OpenedArchives, config: DataConfig) -> DatasetInfo:
    catalog = opened.catalog
    sizes = {name: len(part) for name, part in catalog.parts.items()}
    origins = {name: part.origin for name, part in catalog.parts.items()}
    info = picture_info(catalog.classes, sizes, picture_side(largest_size(config)), origins)
    return replace(info, num_skipped=catalog.num_skipped, order=_describe_order(opened))


def _describe_order(opened: OpenedArchives) -> str:
    windows = _windows(opened)
    if windows is None or opened.copies is None:
        return ""
    all_gb = sum(file.size_bytes for file in opened.catalog.files) / 1e9
    count, size = windows.num_blocks, min(windows.size, windows.num_blocks)
    labels = labels_of(opened.catalog.parts[TRAIN].per_class)
    per_file = len(torch.unique(windows.blocks * len(opened.catalog.classes) + labels)) / count
    return (
        f"in windows of {size} of {count} data files, since {all_gb:.3g} GB exceed the cache of "
        f"{opened.copies.limit_bytes / 1e9:g} GB: a batch is drawn from {size / count:.1%} of the samples "
        f"(a file has {per_file:.0f} of {len(opened.catalog.classes)} classes); "
        f"--cache-gb {math.ceil(all_gb)} shuffles all of them"
    )
