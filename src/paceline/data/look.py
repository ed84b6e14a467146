"""Facts about a data set for a person: class balance, sizes, mean and deviation, duplicates, unreadable files."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from paceline.data.check import decode_all
from paceline.data.dataset import Channels, Dataset, LoadedData, ResidentDataset
from paceline.data.pack import Progress
from paceline.data.parts import TEST, TRAIN, VALIDATION
from paceline.data.picture_folder import find_pictures
from paceline.data.pictures import Seen, thumbnail
from paceline.data.preview import to_image
from paceline.data.sources.folder import FolderDataset

_MEASURED = 2048  # samples of data that is read from disk
_CHUNK = 256


@dataclass(frozen=True)
class Place:
    """A sample of a data set."""

    part: str
    index: int
    name: str  # its file, or its number
    label: int


@dataclass(frozen=True)
class DataFacts:
    per_class: dict[str, list[int]]  # samples of each class, by part; validation is what a run validates with
    sizes: dict[tuple[int, int], int]  # how many pictures have this width and height
    mean: Channels  # of the training samples, from 0 to 1; vectors have one value
    std: Channels
    num_measured: int
    num_checked: int  # samples that were read or decoded; 0: nothing below is known
    leaks: list[list[Place]] = field(default_factory=list)  # equal samples in training and in the test or validation
    repeats: int = 0  # samples of a part that are equal to an earlier one of it
    conflicts: list[list[Place]] = field(default_factory=list)  # equal samples with different classes
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (file, why)


def look_at_data(
    data: LoadedData, train_ids: Tensor, validation_ids: Tensor, *, workers: int, progress: Progress | None
) -> DataFacts:
    """Without `progress`, samples are not compared and pictures are not decoded at full size."""
    parts = _parts(data, train_ids, validation_ids)
    num_classes = data.info.num_classes
    per_class = {
        part: torch.bincount(dataset.labels[ids], minlength=num_classes).tolist()
        for part, (dataset, ids) in parts.items()
    }
    mean, std, num_measured = _measure(data.train, train_ids)
    shape = data.info.sample_shape
    total = sum(len(ids) for _, ids in parts.values())
    sizes = Counter({(shape[2], shape[1]): total}) if data.info.is_image else Counter()
    if progress is None:
        is_known = data.info.is_image and not isinstance(data.train, FolderDataset)
        return DataFacts(per_class, dict(sizes) if is_known else {}, mean, std, num_measured, 0)
    digests, unreadable = defaultdict[bytes, list[Place]](list), list[tuple[str, str]]()
    if isinstance(data.train, FolderDataset):
        sizes = Counter()
        seen = _decode(data.train, workers, progress)
        for place, path in _folder_places(parts, data.train.root):
            found = seen[path]
            if isinstance(found, str):
                unreadable.append((place.name, found))
                continue
            sizes[found.width, found.height] += 1
            digests[found.digest].append(place)
    else:
        progress.start(total, 0)
        for place, digest in _hash_samples(parts, progress):
            digests[digest].append(place)
    groups = [group for group in digests.values() if len(group) > 1]
    return DataFacts(
        per_class,
        dict(sizes),
        mean,
        std,
        num_measured,
        num_checked=total,
        leaks=[group for group in groups if TRAIN in (kinds := {p.part for p in group}) and len(kinds) > 1],
        repeats=sum(len(group) - len({place.part for place in group}) for group in groups),
        conflicts=[group for group in groups if len({place.label for place in group}) > 1],
        unreadable=unreadable,
    )


def _parts(data: LoadedData, train_ids: Tensor, validation_ids: Tensor) -> dict[str, tuple[Dataset, Tensor]]:
    parts = {TRAIN: (data.train, train_ids)}
    if len(validation_ids):
        parts[VALIDATION] = (data.validation or data.train, validation_ids)
    return {**parts, TEST: (data.test, torch.arange(len(data.test)))}


def _measure(train: Dataset, ids: Tensor) -> tuple[Channels, Channels, int]:
    """Mean and deviation of all training samples in memory, or of some that are spread evenly over the others."""
    if not isinstance(train, ResidentDataset):
        ids = ids[:: max(1, len(ids) // _MEASURED)][:_MEASURED]
    total = squares = torch.zeros((), dtype=torch.float64)
    count = 0
    for chunk in ids.split(_CHUNK):
        values = train.read(chunk).double()
        values = values / 255 if values.dim() == 4 else values[:, None, :, None]
        total = total + values.sum((0, 2, 3))
        squares = squares + (values * values).sum((0, 2, 3))
        count += values.numel() // values.shape[1]
    mean = total / count
    deviation = (squares / count - mean * mean).clamp(min=0).sqrt()
    return tuple(mean.tolist()), tuple(deviation.tolist()), len(ids)


def _decode(train: FolderDataset, workers: int, progress: Progress) -> dict[Path, Seen | str]:
    return decode_all(find_pictures(train.root), workers, progress)


def _folder_places(parts: dict[str, tuple[Dataset, Tensor]], root: Path) -> Iterator[tuple[Place, Path]]:
    for part, (dataset, ids) in parts.items():
        assert isinstance(dataset, FolderDataset)
        for index in ids.tolist():
            path = dataset.paths[index]
            yield Place(part, index, str(path.relative_to(root)), int(dataset.labels[index])), path


def _hash_samples(parts: dict[str, tuple[Dataset, Tensor]], progress: Progress) -> Iterator[tuple[Place, bytes]]:
    for part, (dataset, ids) in parts.items():
        for chunk in ids.split(_CHUNK):
            labels = dataset.labels[chunk].tolist()
            samples = dataset.read(chunk).contiguous().numpy()
            for index, label, sample in zip(chunk.tolist(), labels, samples, strict=True):
                yield Place(part, index, f"sample {index}", label), hashlib.sha256(sample.tobytes()).digest()
            progress.advance(len(chunk))


def choose_samples(labels: Tensor, ids: Tensor, count: int) -> list[int]:
    """Samples of as many classes as possible, the same in every call."""
    by_class = defaultdict[int, list[int]](list)
    for index, label in zip(ids.tolist(), labels[ids].tolist(), strict=True):
        if len(by_class[label]) < count:
            by_class[label].append(index)
    rounds = [group[turn] for turn in range(count) for _, group in sorted(by_class.items()) if turn < len(group)]
    return rounds[:count]


def original(dataset: Dataset, index: int, side: int) -> Image.Image:
    """The picture of a sample before anything is done to it. Of a folder: the whole picture, not only its square."""
    if isinstance(dataset, FolderDataset):
        return thumbnail(dataset.paths[index], side)
    return to_image(dataset.read(torch.tensor([index]))[0])
