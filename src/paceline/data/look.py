"""Facts about a data set for a person: labels, sizes, mean and deviation, duplicates, unreadable files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from PIL import Image
from torch import Tensor

from paceline.data.dataset import Channels, Dataset, DatasetInfo, LoadedData, ResidentDataset
from paceline.data.decoders import look_at
from paceline.data.encoded import EncodedDataset
from paceline.data.pack import Progress
from paceline.data.parts import TEST, TRAIN, VALIDATION
from paceline.data.pictures import Seen, thumbnail
from paceline.data.preview import to_image
from paceline.settings.tasks import REGRESSION

_MEASURED = 2048  # samples of data that is read from disk
_CHUNK = 256
_BINS = 20  # of the histogram of a number


@dataclass(frozen=True)
class Place:
    """A sample of a data set."""

    part: str
    index: int
    name: str  # its file, or its number
    label: str  # its class, its labels or its numbers, as text


@dataclass(frozen=True)
class NumberFacts:
    """One number that a regression learns."""

    name: str
    spread: dict[str, tuple[float, float, float, float]]  # of each part: smallest, mean, deviation, largest
    bins: tuple[str, ...]  # equal ranges from the smallest to the largest value of all parts
    per_bin: dict[str, list[int]]  # samples in each, by part


@dataclass(frozen=True)
class DataFacts:
    num_samples: dict[str, int]  # by part; validation is what a run validates with
    per_class: dict[str, list[int]]  # samples of each class, by part; empty for a regression
    numbers: list[NumberFacts]  # of a regression
    sizes: dict[tuple[int, int], int]  # how many pictures have this width and height
    mean: Channels  # of the training samples, from 0 to 1; vectors have one value
    std: Channels
    num_measured: int
    num_checked: int  # samples that were read or decoded; 0: nothing below is known
    leaks: list[list[Place]] = field(default_factory=list)  # equal samples in training and in the test or validation
    repeats: int = 0  # samples of a part that are equal to an earlier one of it
    conflicts: list[list[Place]] = field(default_factory=list)  # equal samples with different labels
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (file, why)


def look_at_data(
    data: LoadedData, train_ids: Tensor, validation_ids: Tensor, *, workers: int, progress: Progress | None
) -> DataFacts:
    """Without `progress`, samples are not compared and pictures are not decoded at full size."""
    parts = _parts(data, train_ids, validation_ids)
    num_samples = {part: len(ids) for part, (_, ids) in parts.items()}
    labels = {part: dataset.labels[ids] for part, (dataset, ids) in parts.items()}
    is_regression = data.info.task == REGRESSION
    per_class = {} if is_regression else {part: _count_classes(of, data.info) for part, of in labels.items()}
    numbers = _describe_numbers(labels, data.info.classes) if is_regression else []
    mean, std, num_measured = _measure(data.train, train_ids)
    shape = data.info.sample_shape
    total = sum(num_samples.values())
    sizes = Counter({(shape[2], shape[1]): total}) if data.info.is_image else Counter()
    if progress is None:
        is_known = data.info.is_image and not isinstance(data.train, EncodedDataset)
        return DataFacts(num_samples, per_class, numbers, dict(sizes) if is_known else {}, mean, std, num_measured, 0)
    digests, unreadable = defaultdict[bytes, list[Place]](list), list[tuple[str, str]]()
    if isinstance(data.train, EncodedDataset):
        sizes = Counter()
        progress.start(total, 0)
        for place, found in _decode(parts, data.info, workers):
            progress.advance(1)
            if isinstance(found, str):
                unreadable.append((place.name, found))
                continue
            sizes[found.width, found.height] += 1
            digests[found.digest].append(place)
    else:
        progress.start(total, 0)
        for place, digest in _hash_samples(parts, data.info, progress):
            digests[digest].append(place)
    groups = [group for group in digests.values() if len(group) > 1]
    return DataFacts(
        num_samples,
        per_class,
        numbers,
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


def _decode(
    parts: dict[str, tuple[Dataset, Tensor]], info: DatasetInfo, workers: int
) -> Iterator[tuple[Place, Seen | str]]:
    """Every picture at its full size. For one that cannot be read: why."""
    with ThreadPoolExecutor(workers, "look") as pool:
        for part, (dataset, ids) in parts.items():
            assert isinstance(dataset, EncodedDataset)
            names = list(dataset.names())
            for chunk in ids.split(_CHUNK):
                seen = pool.map(partial(look_at, dataset.pictures), chunk.tolist())
                for index, found in zip(chunk.tolist(), seen, strict=True):
                    label = label_text(dataset.labels[index], info)
                    yield Place(part, index, os.fsdecode(names[index]), label), found


def _count_classes(labels: Tensor, info: DatasetInfo) -> list[int]:
    """Samples of each class. A sample with several labels counts for each of them."""
    counts = torch.bincount(labels, minlength=info.num_classes) if labels.dim() == 1 else labels.sum(0).long()
    return [int(count) for count in counts]


def _describe_numbers(labels: dict[str, Tensor], names: Sequence[str]) -> list[NumberFacts]:
    found = []
    for column, name in enumerate(names):
        values = {part: of[:, column].double() for part, of in labels.items() if len(of)}
        low, high = (float(end) for end in torch.cat(list(values.values())).aminmax())
        edges = torch.linspace(low, high if high > low else low + 1, _BINS + 1, dtype=torch.float64)
        inner = edges[1:-1].contiguous()
        found.append(
            NumberFacts(
                name,
                {
                    part: (float(of.min()), float(of.mean()), float(of.std(correction=0)), float(of.max()))
                    for part, of in values.items()
                },
                tuple(f"{start:.3g} to {end:.3g}" for start, end in pairwise(edges.tolist())),
                {
                    part: torch.bincount(torch.bucketize(of, inner, right=True), minlength=_BINS).tolist()
                    for part, of in values.items()
                },
            )
        )
    return found


def label_text(label: Tensor, info: DatasetInfo) -> str:
    """The class of a sample, its labels, or its numbers."""
    if info.task == REGRESSION:
        return ", ".join(f"{number:.5g}" for number in label.tolist())
    if label.dim() == 0:
        return info.classes[int(label)]
    return ", ".join(name for name, is_set in zip(info.classes, label.tolist(), strict=True) if is_set) or "no label"


def _hash_samples(
    parts: dict[str, tuple[Dataset, Tensor]], info: DatasetInfo, progress: Progress
) -> Iterator[tuple[Place, bytes]]:
    for part, (dataset, ids) in parts.items():
        for chunk in ids.split(_CHUNK):
            samples = dataset.read(chunk).contiguous().numpy()
            for index, label, sample in zip(chunk.tolist(), dataset.labels[chunk], samples, strict=True):
                digest = hashlib.sha256(sample.tobytes()).digest()
                yield Place(part, index, f"sample {index}", label_text(label, info)), digest
            progress.advance(len(chunk))


def choose_samples(labels: Tensor, ids: Tensor, count: int, task: str) -> list[int]:
    """Samples of as many classes (or combinations of labels, or values) as possible, the same in every call."""
    if task == REGRESSION:
        ordered = ids[labels[ids][:, 0].argsort(stable=True)]
        return ordered[torch.linspace(0, len(ids) - 1, min(count, len(ids))).round().long()].tolist()
    groups = defaultdict[tuple[float, ...], list[int]](list)
    for index, label in zip(ids.tolist(), labels[ids].view(len(ids), -1).tolist(), strict=True):
        if len(groups[tuple(label)]) < count:
            groups[tuple(label)].append(index)
    rounds = [group[turn] for turn in range(count) for _, group in sorted(groups.items()) if turn < len(group)]
    return rounds[:count]


def original(dataset: Dataset, index: int, side: int) -> Image.Image:
    """The picture of a sample before anything is done to it. An encoded one is whole, not only its square."""
    if isinstance(dataset, EncodedDataset):
        return thumbnail(dataset.pictures.read(index), side)
    return to_image(dataset.read(torch.tensor([index]))[0])
