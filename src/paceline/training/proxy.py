"""Scores the training samples with a small trained model (a proxy), for --keep-share.

The score of a sample is its loss without augmentation. Samples are scored in fixed chunks, in float32, with one thread
on a CPU: which rank scores a chunk, and how many ranks there are, changes no bit. The hash of the proxy's weights is a
part of the run's config, so a resumed run refuses another proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.ahead import ReadingWatch, read_ahead
from paceline.data.dataset import Dataset, DatasetInfo, ResidentDataset
from paceline.data.keep import Selection, select_by
from paceline.errors import UserError
from paceline.parallel.collectives import sum_over_ranks
from paceline.runs.catalog import locate_run
from paceline.runtime.detect import World
from paceline.settings.keep_rules import count_kept
from paceline.settings.schema import Config
from paceline.settings.tasks import MULTI_LABEL, SINGLE_LABEL
from paceline.training.model_record import ModelRecord
from paceline.training.weights_hash import hash_model

_MOST_SHOWN = 80  # characters of a list of classes
_CHUNK = 256  # samples; another number would change the last bits of the scores


@dataclass(frozen=True)
class Proxy:
    """A trained model on the CPU, and what it was trained for."""

    name: str
    module: nn.Module
    sha256: str
    record: ModelRecord


@lru_cache(maxsize=1)  # the config is completed before the samples are scored: the proxy is loaded once
def open_proxy(name: str) -> Proxy:
    from paceline.training.reuse import find_saved  # it imports the decoders, which other runs may not need

    saved = find_saved(Path(locate_run(name)), [])
    module = saved.record.load_model(saved.checkpoint)
    return Proxy(name, module, hash_model(module), saved.record)


def name_proxy(config: Config) -> Config:
    """The config with the hash of its proxy. UserError if it names another hash."""
    given = config.data
    if given.keep_share == 1:
        return config
    proxy = open_proxy(given.keep_by)
    if given.keep_by_sha256 not in ("", proxy.sha256):
        raise UserError(
            "the samples of this run were selected by another proxy",
            where="--keep-by",
            got=f"{given.keep_by}, SHA-256 {proxy.sha256[:16]}...",
            allowed=f"a proxy with the SHA-256 {given.keep_by_sha256[:16]}...",
            hint="name the checkpoint that the run began with, or start a new run",
        )
    return replace(config, data=replace(given, keep_by_sha256=proxy.sha256))


def select_samples(
    config: Config, dataset: Dataset, info: DatasetInfo, ids: Tensor, world: World, is_alive: Callable[[], None]
) -> Selection | None:
    """The samples that epochs keep, of the training samples `ids`; None if they keep all. Collective.

    `is_alive` is called before each chunk.
    """
    if config.data.keep_share == 1:
        return None
    proxy = open_proxy(config.data.keep_by)
    _require_fitting(proxy, info)
    scores = score_samples(proxy, dataset, ids, world, is_alive)
    open_proxy.cache_clear()  # its weights are not needed any more
    return select_by(scores, *count_kept(config.data, len(ids)))


def score_samples(proxy: Proxy, dataset: Dataset, ids: Tensor, world: World, is_alive: Callable[[], None]) -> Tensor:
    """The loss of each sample, float32, on the CPU. Collective."""
    chunks = list(ids.split(_CHUNK))
    scores = torch.zeros(len(ids))
    places = scores.split(_CHUNK)
    own = range(world.rank, len(chunks), world.world_size)
    module = proxy.module.to(world.device).eval()
    with torch.no_grad(), _fixed_kernels():
        for number, (chunk, samples) in zip(own, _read(dataset, [chunks[one] for one in own], world), strict=True):
            is_alive()
            inputs = proxy.record.pipeline.for_evaluation(samples.to(world.device))
            targets = dataset.labels[chunk].to(world.device)
            places[number].copy_(sample_losses(module(inputs).float(), targets, proxy.record.info.task))
    module.cpu()
    return sum_over_ranks(scores.to(world.device), world).cpu()  # each number is 0 on all ranks but one


def sample_losses(outputs: Tensor, targets: Tensor, task: str) -> Tensor:
    """One loss per sample. Samples with several labels or numbers have the mean of theirs."""
    if task == SINGLE_LABEL:
        return F.cross_entropy(outputs, targets, reduction="none")
    if task == MULTI_LABEL:
        return F.binary_cross_entropy_with_logits(outputs, targets.float(), reduction="none").mean(1)
    return F.mse_loss(outputs, targets.float().view_as(outputs), reduction="none").flatten(1).mean(1)


def _read(dataset: Dataset, chunks: list[Tensor], world: World) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(dataset, ResidentDataset):
        return ((ids, dataset.read(ids)) for ids in chunks)
    return read_ahead(dataset, chunks, world.device, ReadingWatch(dataset))


@contextmanager
def _fixed_kernels() -> Iterator[None]:
    """The same kernels in every run: the number of threads, and a benchmark of kernels, may change bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_num_threads(threads)


def _require_fitting(proxy: Proxy, info: DatasetInfo) -> None:
    own = proxy.record.info
    facts = {
        "task": (own.task, info.task),
        "classes": (_name_classes(own), _name_classes(info)),
        "samples": (_name_shape(own), _name_shape(info)),
    }
    for name, (got, allowed) in facts.items():
        if got != allowed:
            raise UserError(
                f"the proxy was trained on other data: other {name}",
                where="--keep-by",
                got=f"{proxy.name}: {_shorten(got)}",
                allowed=_shorten(allowed),
                hint="train the proxy on the data of this run",
            )


def _name_classes(info: DatasetInfo) -> str:
    return f"{len(info.classes)} classes: {', '.join(info.classes)}"


def _name_shape(info: DatasetInfo) -> str:
    return "x".join(map(str, info.sample_shape))


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
