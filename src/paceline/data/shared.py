"""One copy of a data set per node: the first rank makes it, the others map the same memory.

Only for sources that are kept in memory and are identical on every machine. A rank that cannot map the shared
memory makes its own copy.
"""

from __future__ import annotations

import logging
import math
from itertools import accumulate

import torch
from torch import Tensor

from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.registry import describe_dataset, is_resident, load_dataset
from paceline.runtime.detect import World
from paceline.runtime.node_memory import HEADER_BYTES, Exchange, NodeMemory, has_node_memory, share_memory
from paceline.settings.schema import DataConfig

_log = logging.getLogger("paceline")
_LINE_BYTES = 64


def load_once_per_node(config: DataConfig, seed: int, world: World, exchange: Exchange) -> LoadedData:
    """What `load_dataset` gives, with one copy for all ranks of a node. Collective."""
    if not is_resident(config) or world.world_size == 1:
        return load_dataset(config, seed)
    info = describe_dataset(config, seed)
    layout = _Layout(info)

    def fill(shared: NodeMemory) -> None:
        for place, tensor in zip(layout.views(shared), _tensors(load_dataset(config, seed)), strict=True):
            place.copy_(tensor)

    shared = share_memory(layout.size_bytes, world, exchange, fill)
    if shared is None:
        if has_node_memory(world):
            _log.info("note: rank %d keeps its own copy of the data: the node's ranks share no memory", world.rank)
        return load_dataset(config, seed)
    samples, labels, test_samples, test_labels = layout.views(shared)
    return LoadedData(info, ResidentDataset(samples, labels), ResidentDataset(test_samples, test_labels))


def _tensors(data: LoadedData) -> list[Tensor]:
    assert isinstance(data.train, ResidentDataset)
    assert isinstance(data.test, ResidentDataset)
    return [data.train.samples, data.train.labels, data.test.samples, data.test.labels]


class _Layout:
    """The places of the four tensors. Every rank computes them from the description alone."""

    def __init__(self, info: DatasetInfo) -> None:
        kind = torch.uint8 if info.is_image else torch.float32
        self._parts = [
            part
            for count in (info.num_train, info.num_test)
            for part in ((kind, (count, *info.sample_shape)), (torch.int64, (count,)))
        ]
        sizes = [_LINE_BYTES * -(-kind.itemsize * math.prod(shape) // _LINE_BYTES) for kind, shape in self._parts]
        *self._starts, self.size_bytes = accumulate(sizes, initial=0)

    def views(self, shared: NodeMemory) -> list[Tensor]:
        return [
            torch.frombuffer(shared.memory, dtype=kind, count=math.prod(shape), offset=HEADER_BYTES + start).view(shape)
            for (kind, shape), start in zip(self._parts, self._starts, strict=True)
        ]
