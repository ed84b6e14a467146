"""The interface of a data set: labels in memory, samples read by index.

`read` takes a whole batch of indices. A resident data set answers with one gather, a folder of images with one
round of its thread pool. Nothing here is random: `order.py` makes the order, `augment.py` the augmentation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.data.parts import TEST, TRAIN, VALIDATION
from paceline.settings.tasks import SINGLE_LABEL

Channels = tuple[float, ...]
MOST_CLASSES = 1_000_000
_PROBES = 8


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set without loading it."""

    name: str
    num_train: int  # with the samples that a run holds out for validation
    num_test: int
    classes: tuple[str, ...]  # of a regression: the names of its numbers
    sample_shape: tuple[int, ...]  # of a raw sample: (3, 32, 32) for an image, (784,) for a vector
    mean: Channels = ()  # per channel of uint8 images, in [0, 1]; empty for floats, which are not normalised
    std: Channels = ()
    num_validation: int = 0  # of the validation set, if the data has its own
    task: str = SINGLE_LABEL  # decides what `classes` and labels are
    order: str = field(default="", compare=False, repr=False)  # what is special about the order of training samples
    folders: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)  # (part, its folder)
    num_skipped: int = field(default=0, compare=False, repr=False)  # files and folders that are not read

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def is_image(self) -> bool:
        return len(self.sample_shape) == 3

    @property
    def is_float(self) -> bool:
        """Whether samples are float32 images or vectors. They reach the model as they are."""
        return not self.mean

    @property
    def takes_pictures(self) -> bool:
        """Whether a picture file can become a sample. True for square uint8 images of 1 or 3 channels."""
        is_square = self.is_image and self.sample_shape[1] == self.sample_shape[2]
        return is_square and not self.is_float and self.sample_shape[0] in (1, 3)


@dataclass(frozen=True)
class Windows:
    """The training samples of data that exceeds its cache: an epoch reads only some data files at a time."""

    blocks: Tensor  # the data file of each sample, int64
    size: int  # files that are read at a time

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.max()) + 1


class Dataset(Protocol):
    """A fixed set of labelled samples."""

    @property
    def labels(self) -> Tensor:
        """In CPU memory: classes (int64 [N]), 0 and 1 for each class (float32 [N, classes]), or numbers (the same)."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """The samples at these positions: uint8 or float32 images [B, C, H, W], or float32 vectors [B, D]."""
        ...


class ResidentDataset:
    """A data set that lives in memory as one tensor: a batch is one gather."""

    def __init__(self, samples: Tensor, labels: Tensor, sample_weights: Tensor | None = None) -> None:
        if len(samples) != len(labels):
            raise ValueError(f"{len(samples)} samples but {len(labels)} labels")
        self.samples = samples
        self.sample_weights = sample_weights  # for weighted sampling
        self._labels = labels.float() if labels.is_floating_point() else labels.to(torch.int64)

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
    """What every source returns. Without a validation set, a run holds samples of `train` out for validation."""

    info: DatasetInfo
    train: Dataset
    test: Dataset
    validation: Dataset | None = None

    def parts(self) -> Iterator[tuple[str, Dataset]]:
        yield TRAIN, self.train
        if self.validation is not None:
            yield VALIDATION, self.validation
        yield TEST, self.test

    def fingerprint(self) -> str:
        """A short hash of all labels and some samples. Different data sets almost surely have different hashes."""
        digest = hashlib.sha256(repr(self.info).encode())
        for _, part in self.parts():
            digest.update(part.labels.numpy().tobytes())
            some = torch.linspace(0, len(part) - 1, min(_PROBES, len(part))).long()
            digest.update(part.read(some).contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]
