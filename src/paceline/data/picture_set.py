"""The description of a folder of pictures, the same for packed and plain folders. Decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.data.dataset import DatasetInfo

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as pretrained weights expect
STD = (0.229, 0.224, 0.225)


def picture_info(classes: tuple[str, ...], num_train: int, num_test: int, side: int) -> DatasetInfo:
    return DatasetInfo(
        name="folder",
        num_train=num_train,
        num_test=num_test,
        classes=classes,
        sample_shape=(3, side, side),
        mean=MEAN,
        std=STD,
    )


def labels_of(per_class: Sequence[int]) -> Tensor:
    """Labels from class sizes: pictures are sorted by class."""
    return torch.arange(len(per_class)).repeat_interleave(torch.tensor(per_class))
