"""The stages of encoded pictures, each alone: read, decode, crop, copy. Every rank uses its threads of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.data.encoded import EncodedDataset
from paceline.data.loader import Loader
from paceline.data.regions import central_square, decode_box, resize_region
from paceline.metrics.timing import gather_numbers
from paceline.runtime.detect import World

_AT_ONCE = 64  # pictures; their bytes and pixels stay in memory between the stages


@dataclass(frozen=True)
class PictureStages:
    """Pictures per second of all ranks together, each stage alone."""

    threads: int  # per rank
    read_per_s: float  # bytes from disk, or from the kernel's cache of it
    decode_per_s: float  # at the scale that is needed
    crop_per_s: float  # and resize
    copy_per_s: float  # of decoded pictures to the device


def measure_pictures(loader: Loader, world: World, *, seconds: float) -> PictureStages | None:
    """None for data that is not encoded. Collective."""
    dataset = loader.dataset
    if not isinstance(dataset, EncodedDataset):
        return None
    spent = [0.0] * 4
    count = 0
    deadline = time.perf_counter() + seconds
    for ids in _chunks(loader):
        for stage, took_s in enumerate(_time_stages(dataset, loader, ids, world)):
            spent[stage] += took_s
        count += len(ids)
        if time.perf_counter() > deadline:
            break
    rates = gather_numbers([count / took_s for took_s in spent], world)
    return PictureStages(dataset.num_workers, *(sum(column) for column in zip(*rates, strict=True)))


def _chunks(loader: Loader) -> Iterator[torch.Tensor]:
    """Samples in random order, as training reads them."""
    order = torch.randperm(len(loader.ids), generator=torch.Generator().manual_seed(0))
    while True:
        yield from loader.ids[order].split(_AT_ONCE)


def _time_stages(dataset: EncodedDataset, loader: Loader, ids: torch.Tensor, world: World) -> list[float]:
    pipeline, numbers = loader.pipeline, ids.tolist()
    crops = pipeline.crops(ids, 0)
    side = dataset.sample_shape[-1] if crops is None else crops.side
    choose = [central_square] * len(numbers) if crops is None else [draw.box_in for draw in crops.draws()]
    resize = partial(resize_region, side=side, interpolation="bilinear" if crops is None else crops.interpolation)
    took_s = []

    def timed(work: Callable[[], list[Any]]) -> list[Any]:
        began = time.perf_counter()
        found = work()
        took_s.append(time.perf_counter() - began)
        return found

    contents = timed(lambda: dataset.in_threads(dataset.pictures.read, numbers))
    decode = partial(decode_box, side=side, decoder=dataset.library)
    regions = timed(lambda: dataset.in_threads(decode, contents, choose))
    pixels = timed(lambda: dataset.in_threads(resize, regions))
    batch = torch.stack([torch.from_numpy(one) for one in pixels])
    timed(lambda: [_copy(batch, world.device)])
    return took_s


def _copy(batch: torch.Tensor, device: str) -> torch.Tensor:
    copied = batch.clone() if device == "cpu" else batch.pin_memory().to(device)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return copied
