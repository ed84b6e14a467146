"""Pictures in folders, one folder per class.

`data/picture_folder.py` finds the pictures, `data/picture_files.py` reads them, `data/encoded.py` decodes them in
threads. `packed.py` reads folders that `paceline data pack` has packed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.data.dataset import DatasetInfo, LoadedData
from paceline.data.encoded import encoded_dataset
from paceline.data.pack_format import picture_side
from paceline.data.picture_files import PictureFiles
from paceline.data.picture_folder import Pictures, find_pictures
from paceline.data.picture_set import labels_of, picture_info
from paceline.data.pictures import read_pixels
from paceline.settings.resolution import largest_size
from paceline.settings.schema import DataConfig


def read_picture(path: Path, side: int) -> Tensor:
    """A picture as uint8 [3, side, side]: its central square, scaled."""
    return torch.from_numpy(np.array(read_pixels(path, side), order="C"))


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return _info(find_pictures(Path(config.data_dir)), config)


def load(config: DataConfig, seed: int) -> LoadedData:
    pictures = find_pictures(Path(config.data_dir))
    info = _info(pictures, config)
    root, side = pictures.root, info.sample_shape[-1]
    packed = f"{root}-packed" if root.name else "PACKED"
    if_slow = f"pack the pictures once: paceline data pack {root} {packed}, then --data-dir {packed}"
    parts = {}
    for name, part in pictures:
        files, labels = PictureFiles(root, part.paths, if_slow), labels_of(part.per_class)
        parts[name] = encoded_dataset(files, labels, side, config)
    return LoadedData(info, **parts)


def _info(pictures: Pictures, config: DataConfig) -> DatasetInfo:
    sizes = {name: len(part.paths) for name, part in pictures}
    folders = {name: part.folder for name, part in pictures}
    info = picture_info(pictures.classes, sizes, picture_side(largest_size(config)), folders)
    return replace(info, num_skipped=len(pictures.skipped))
