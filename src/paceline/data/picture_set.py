"""The description of a folder of pictures, the same for packed and plain folders. Decodes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.data.dataset import DatasetInfo
from paceline.data.parts import TEST, TRAIN, VALIDATION

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as pretrained weights expect
STD = (0.229, 0.224, 0.225)


def picture_info(
    classes: tuple[str, ...], sizes: Mapping[str, int], side: int, folders: Mapping[str, str] | None = None
) -> DatasetInfo:
    """`sizes`: the number of pictures of each part. `folders`: their folders, if they are not packed."""
    return DatasetInfo(
        name="folder",
        num_train=sizes[TRAIN],
        num_test=sizes[TEST],
        classes=classes,
        sample_shape=(3, side, side),
        mean=MEAN,
        std=STD,
        num_validation=sizes.get(VALIDATION, 0),
        folders=tuple(folders.items()) if folders else (),
    )


def labels_of(per_class: Sequence[int]) -> Tensor:
    """Labels from class sizes: pictures are sorted by class."""
    return torch.arange(len(per_class)).repeat_interleave(torch.tensor(per_class))
