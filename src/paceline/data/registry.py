"""Checks, describes and loads every data set by name.

Checking imports no torch, so a wrong flag is found in a fraction of a second. The module of a source is
imported only when that source is described or loaded. A source is a module with `describe(config, seed)`,
which is cheap, and `load(config, seed)`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from paceline.data.array_folder import ARRAYS, read_header
from paceline.data.input_size import check_made_size, parse_input_size
from paceline.data.jpeg_libraries import no_whole_pictures, require_library
from paceline.data.pack_format import is_packed, open_packed, require_side
from paceline.data.parts import (
    LAYOUT,
    TABLE_LAYOUT,
    TRAIN,
    VALIDATION,
    is_flat,
    part_folders,
    pictures_root,
    require_class_folders,
)
from paceline.data.reference import check_reference, is_reference
from paceline.errors import DataError, UserError
from paceline.runs.stores import is_url
from paceline.settings.load import LoadedConfig
from paceline.settings.resolution import RESIZED, largest_size
from paceline.settings.schema import DataConfig
from paceline.settings.tasks import SINGLE_LABEL

if TYPE_CHECKING:
    from paceline.data.archives.opened import OpenedArchives
    from paceline.data.dataset import DatasetInfo, LoadedData
    from paceline.data.picture_table import PictureTable

__all__ = [
    "DATASET_NAMES",
    "MADE_DATASETS",
    "check_data_config",
    "check_dataset_name",
    "check_train_split",
    "describe_dataset",
    "is_resident",
    "load_dataset",
    "parse_input_size",
    "require_used_split",
]

_MODULES = {
    "shapes": "shapes",
    "synthetic": "synthetic",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "fashion-mnist": "fashion_mnist",
    "folder": "folder",
    "csv": "tables",
    ARRAYS: "arrays",
}
DATASET_NAMES = tuple(_MODULES)
MADE_DATASETS = ("shapes", "synthetic")  # nothing is read from --data-dir
_RESIDENT = (*MADE_DATASETS, "cifar10", "cifar100", "fashion-mnist")
_ONE_CLASS_PER_SAMPLE = (*_RESIDENT, "folder")


class _Source(Protocol):
    def describe(self, config: DataConfig, seed: int) -> DatasetInfo: ...

    def load(self, config: DataConfig, seed: int) -> LoadedData: ...


def check_dataset_name(name: str) -> None:
    """UserError unless `name` is a built-in data set or a reference to a function that exists."""
    if name in _MODULES:
        return
    if is_reference(name):
        check_reference(name, where="dataset")
        return
    close = difflib.get_close_matches(name.lower().replace("_", "-"), DATASET_NAMES, n=1)
    raise UserError(
        "there is no such data set",
        where="dataset",
        got=repr(name),
        allowed=", ".join(DATASET_NAMES) + ", FILE.py:FUNCTION or package.module:FUNCTION",
        hint=f"did you mean {close[0]!r}?" if close else None,
    )


def check_data_config(config: DataConfig) -> None:
    """Check everything about the data that needs no sample."""
    check_dataset_name(config.dataset)
    if config.dataset in MADE_DATASETS:
        check_made_size(config)
    if config.dataset in _ONE_CLASS_PER_SAMPLE and config.task != SINGLE_LABEL:
        raise UserError(
            "this data set has one class per sample",
            where="task",
            got=f"--task {config.task} with --dataset {config.dataset}",
            allowed=SINGLE_LABEL,
            hint="--dataset csv, or a data set function, for other targets",
        )
    require_library(config.decoder)
    if config.crop_from == "picture" and config.dataset in (*_RESIDENT, ARRAYS):
        raise no_whole_pictures(f"--dataset {config.dataset}")
    if config.dataset in ("folder", "csv"):
        _check_folder(config)
    if config.dataset == "csv":
        _read_tables(config)
    if config.dataset == ARRAYS:
        task = read_header(Path(config.data_dir)).task
        if task != config.task:
            raise UserError(
                "these arrays have labels of another task", where="task", got=f"--task {config.task}", allowed=task
            )


def _read_tables(config: DataConfig) -> PictureTable:
    from paceline.data.picture_table import read_tables  # imports Pillow, which other data sets do not need here

    return read_tables(Path(config.data_dir), config.task)


def _check_folder(config: DataConfig) -> None:
    folder = Path(config.data_dir)
    if _has_archives(config):
        _open_archives(config)
        return
    try:
        is_folder = folder.is_dir()
        if is_folder:
            with os.scandir(folder) as entries:
                next(entries, None)
    except OSError as error:  # its own rights, or those of a folder above it
        raise DataError(
            "the folder of the data cannot be read",
            where=str(folder.absolute()),
            got=error.strerror,
            hint="ls -ld shows its owner and rights",
        ) from error
    if not is_folder:
        raise UserError(
            "there is no such folder",
            where="data-dir",
            got=str(folder.absolute()),
            allowed=f"a folder that holds {LAYOUT if config.dataset == 'folder' else TABLE_LAYOUT}",
            hint="--data-dir PATH",
        )
    if config.dataset == "folder" and is_packed(folder):
        packed = open_packed(folder)
        if config.crop_from == "picture" and packed.encoding is None:
            raise no_whole_pictures(f"{folder}, which is packed as pixels")
        require_side(packed, folder, largest_size(config), can_shrink=config.augment in RESIZED)
    elif config.dataset == "folder":
        _check_class_folders(folder)


def _has_archives(config: DataConfig) -> bool:
    """Whether --data-dir is an archive, or a folder with archives instead of class folders."""
    if config.dataset != "folder" or is_url(config.data_dir):
        return config.dataset == "folder"
    from paceline.data.archives.places import has_archives

    try:
        return has_archives(Path(config.data_dir))
    except OSError:
        return False  # the folder is checked next


def _open_archives(config: DataConfig) -> OpenedArchives:
    from paceline.data.archives.opened import open_archives  # imports numpy, which other data sets do not need here

    return open_archives(config)


def _check_class_folders(folder: Path) -> None:
    """Only names are read here. The ranks look into every class folder."""
    try:
        folder = pictures_root(folder)
        parts = part_folders(folder)
        for part, name in parts.items() or (("", ""),):
            if part in ("", TRAIN) or not is_flat(folder / name):
                require_class_folders(folder / name)
    except OSError as error:
        raise DataError("this folder cannot be read", where=str(error.filename), got=error.strerror) from error


def check_train_split(loaded: LoadedConfig) -> None:
    """Refuse --train-split for folders and arrays with validation samples. Of functions only a call shows it."""
    folder = Path(loaded.config.data.data_dir)
    if _has_archives(loaded.config.data):
        require_used_split(loaded, VALIDATION in _open_archives(loaded.config.data).catalog.parts)
    elif loaded.config.data.dataset == "folder":
        parts = open_packed(folder).parts if is_packed(folder) else part_folders(pictures_root(folder))
        require_used_split(loaded, VALIDATION in parts)
    elif loaded.config.data.dataset == "csv":
        require_used_split(loaded, VALIDATION in _read_tables(loaded.config.data).parts)
    elif loaded.config.data.dataset == ARRAYS:
        require_used_split(loaded, VALIDATION in read_header(folder).parts)


def require_used_split(loaded: LoadedConfig, has_validation: bool) -> None:
    """Refuse --train-split on the command line if nothing is split. In a recipe it is for data without such a set.

    Folds are refused everywhere: a run of a cross-validation with another validation set is not one.
    """
    if has_validation and loaded.config.data.folds:
        raise UserError(
            "--folds cuts the training set, but this data has a validation set of its own",
            where=loaded.where("folds"),
            got=loaded.config.data.folds,
            hint="leave --folds out; to cut the training set, move the validation set away or into it",
        )
    if has_validation and loaded.origin("train_split") == "flag":
        raise UserError(
            "--train-split has no effect: this data has a validation set of its own",
            where=loaded.where("train_split"),
            got=f"{loaded.config.data.train_split:g}",
            hint="leave --train-split out; to split the training set instead, move the validation set away",
        )


def describe_dataset(config: DataConfig, seed: int) -> DatasetInfo:
    """Sizes, classes and sample shape. Makes and decodes no sample."""
    return _source(config).describe(config, seed)


def forget_data() -> None:
    """Free what the user's function has returned. It is kept from `describe_dataset` to `load_dataset`."""
    custom = sys.modules.get("paceline.data.sources.custom")
    if custom is not None:
        custom.load.cache_clear()


def load_dataset(config: DataConfig, seed: int) -> LoadedData:
    """All parts, ready to be read. Downloads absent files where possible."""
    return _source(config).load(config, seed)


def is_resident(config: DataConfig) -> bool:
    """Whether it is a built-in data set that is kept in memory as described by its info."""
    return config.dataset in _RESIDENT


def _source(config: DataConfig) -> _Source:
    check_data_config(config)
    module = _MODULES.get(config.dataset, "custom")
    if config.dataset == "folder" and is_packed(Path(config.data_dir)):
        module = "packed"
    elif _has_archives(config):
        module = "archives"
    return cast(_Source, importlib.import_module(f"paceline.data.sources.{module}"))
