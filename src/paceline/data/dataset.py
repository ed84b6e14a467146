"""The interface of a data set: labels in memory, samples read by index.

`read` takes a whole batch of indices. A resident data set answers with one gather, a folder of images with one
round of its thread pool. Nothing here is random: `order.py` makes the order, `augment.py` the augmentation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Channels = tuple[float, ...]
_PROBES = 8


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set without loading it."""

    name: str
    num_train: int  # training and validation samples together
    num_test: int
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]  # of a raw sample: (3, 32, 32) for an image, (784,) for a vector
    mean: Channels = ()  # per channel, in [0, 1]; empty for vectors
    std: Channels = ()

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def is_image(self) -> bool:
        return len(self.sample_shape) == 3

    @property
    def takes_pictures(self) -> bool:
        """Whether a picture file can become a sample. True for square images."""
        return self.is_image and self.sample_shape[1] == self.sample_shape[2]


class Dataset(Protocol):
    """A fixed set of labelled samples."""

    @property
    def labels(self) -> Tensor:
        """int64 [N], in CPU memory."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """The samples at these positions: uint8 images [B, C, H, W] or float32 vectors [B, D]."""
        ...


class ResidentDataset:
    """A data set that lives in memory as one tensor: a batch is one gather."""

    def __init__(self, samples: Tensor, labels: Tensor) -> None:
        if len(samples) != len(labels):
            raise ValueError(f"{len(samples)} samples but {len(labels)} labels")
        self.samples = samples
        self._labels = labels.to(torch.int64)

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, indices: Tensor) -> Tensor:
        # On CPUs index_select is several times as fast as indexing for rows of bytes.
        return self.samples.index_select(0, indices.to(self.samples.device))


@dataclass(frozen=True)
class LoadedData:
    """The two halves that every source returns. The validation split is taken from `train` later."""

    info: DatasetInfo
    train: Dataset
    test: Dataset

    def fingerprint(self) -> str:
        """A short hash of all labels and some samples. Different data sets almost surely have different hashes."""
        digest = hashlib.sha256(repr(self.info).encode())
        for part in (self.train, self.test):
            digest.update(part.labels.numpy().tobytes())
            some = torch.linspace(0, len(part) - 1, min(_PROBES, len(part))).long()
            digest.update(part.read(some).contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]
