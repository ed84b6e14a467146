"""Gives each rank its share of every batch, on its device.

The order of an epoch is cut into global batches, and a global batch into adjacent shares, one per rank.
Data sets that read files are read ahead by one thread. Resident data sets are gathered on demand.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline.data.ahead import ReadingWatch, ReadsCrops, read_ahead
from paceline.data.augment import Pipeline
from paceline.data.crops import Crops
from paceline.data.dataset import Dataset, ResidentDataset
from paceline.data.jpeg_libraries import no_whole_pictures
from paceline.data.order import even_shares, samples_of
from paceline.data.sampling import Sampling
from paceline.runtime.detect import World
from paceline.runtime.memory import return_freed_memory
from paceline.runtime.recorded import Recorded

_MANY = 20_000  # samples; from here on the memory for sorting them is returned to the kernel
_COPIED_AT_ONCE = 1024  # samples per copy when a data set moves to the GPU


@dataclass(frozen=True)
class LaneAudit:
    """What is computed twice in a step: a lane of another rank."""

    rank: int  # whose lane this rank recomputes
    lane: int  # which of the lanes of each rank
    share: Batch | None = None  # of that rank; None: this rank's own


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch."""

    inputs: Tensor
    labels: Tensor
    ids: Tensor  # sample numbers in the data set
    wait_s: float  # how long the loop waited for it
    loss_scale: Tensor | None = None  # of the whole global batch, for a mean weighted by class
    audit: LaneAudit | None = None  # in an audited step


@dataclass(frozen=True)
class EvaluationBatch:
    inputs: Tensor
    labels: Tensor
    share: int  # which of this rank's shares
    is_counted: bool  # False for padding: it only gives all ranks the same number of forward passes


class Loader:
    """Reads one part (training, validation or test) of a data set for this rank."""

    def __init__(
        self, dataset: Dataset, ids: Tensor, pipeline: Pipeline, world: World, sampling: Sampling | None = None
    ) -> None:
        if pipeline.crops_pictures and not isinstance(dataset, ReadsCrops):
            raise no_whole_pictures(type(dataset).__name__)
        self.ids = ids
        self._sampling = sampling or Sampling(len(ids))
        self.pipeline = pipeline
        self._world = world
        self._dataset = _make_resident(dataset, world.device)
        self._watch = ReadingWatch(self._dataset)
        self._labels = dataset.labels.to(world.device)
        self._records = world.device.startswith("cuda")
        self._recorded: tuple[int, Recorded] | None = None  # the input size of the CUDA graph, and the graph

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dataset(self) -> Dataset:
        """The data set that it reads, perhaps as a copy on the GPU."""
        return self._dataset

    @property
    def device(self) -> torch.device:
        return self._labels.device

    def on_part(self, ids: Tensor) -> Loader:
        """A loader of other sample ids. It shares the data set that is already on the device."""
        part = copy.copy(self)
        part.ids = ids
        return part

    def of_rank(self, rank: int) -> Loader:
        """A loader of another rank's shares."""
        other = copy.copy(self)
        other._world = replace(self._world, rank=rank)
        other._recorded = None  # a recording of its own: the results of the other one stay in use
        return other

    def train_epoch(
        self,
        *,
        seed: int,
        epoch: int,
        global_batch_size: int,
        first_step: int,
        batch_scale: Callable[[Tensor], Tensor | None] | None = None,
        audits: Mapping[int, LaneAudit] | None = None,
    ) -> Iterator[Batch]:
        """This rank's batches of an epoch, starting at `first_step`. A last partial batch is left out.

        `batch_scale` computes the scale of the loss from the labels of whole global batches. Every rank knows them, so
        no collective is needed. `audits`: by the step of the epoch, whose share comes along with the own one.
        """
        audits = {step - first_step: audit for step, audit in (audits or {}).items() if step >= first_step}
        batches = self.global_batches(seed, epoch, global_batch_size)[first_step:]
        self._announce(samples_of(batches))
        scales = None
        if batch_scale is not None and self.pipeline.extras.mixing is None:
            scales = batch_scale(self._labels[samples_of(batches)])
        others = {number: audit.rank for number, audit in audits.items() if audit.rank != self._world.rank}
        shares = self._with_shares_of(others, batches)
        make_batches = self._gather_batches if isinstance(self._dataset, ResidentDataset) else self._read_batches
        made = make_batches(shares, epoch)
        asked = time.perf_counter()
        for number in range(len(batches)):
            scale = scales[number] if scales is not None else None
            audit = audits.get(number)
            if audit is not None and number in others:
                ids, *made_now = next(made)
                inputs, labels = (tensor.clone() for tensor in made_now)  # a recorded batch reuses its memory
                audit = replace(audit, share=Batch(inputs, labels, ids, wait_s=0.0, loss_scale=scale))
            ids, inputs, labels = next(made)
            yield Batch(inputs, labels, ids, time.perf_counter() - asked, scale, audit)
            asked = time.perf_counter()

    def warm_up(self, batch_size: int, epoch: int) -> None:
        """On a GPU, load the kernels and record the CUDA graph of a batch now instead of in the first steps."""
        if self._records and isinstance(self._dataset, ResidentDataset):
            shares = self._cut_own(self.global_batches(0, 0, batch_size * self._world.world_size))
            if len(shares):
                drawn = self.pipeline.draw(shares, self.pipeline.keys_of(0).to(shares.device))
                gather = self._gather_in(epoch)
                assert isinstance(gather, Recorded)
                gather.prepare(samples_of(shares[0]), drawn.unbind(-2)[0])

    def global_batches(self, seed: int, epoch: int, global_batch_size: int) -> Tensor:
        """The draw keys of all ranks, a row for each step of the epoch, on the device."""
        # On a GPU the sort is short and asynchronous. On a CPU it takes as long as a few steps.
        ids = self.ids.to(self._labels.device)
        batches = self._sampling.batches(ids, seed, epoch, global_batch_size, self.pipeline.repeats)
        if len(self.ids) >= _MANY and self._world.device == "cpu":
            return_freed_memory()  # 80 MB for the order of a million samples
        return batches

    def _cut_own(self, batches: Tensor) -> Tensor:
        """This rank's part of each global batch."""
        shares = batches.view(len(batches), self._world.world_size, -1)
        return shares[:, self._world.rank].contiguous()

    def _with_shares_of(self, others: Mapping[int, int], batches: Tensor) -> Tensor:
        """This rank's shares; before some of them, the share of another rank of the same step."""
        own = self._cut_own(batches)
        if not others:
            return own
        parts, start = [], 0
        for number, rank in sorted(others.items()):
            parts += [own[start:number], batches[number].view(self._world.world_size, -1)[rank][None]]
            start = number
        return torch.cat([*parts, own[start:]])

    def _gather_batches(self, shares: Tensor, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches of a resident data set. On a GPU one CUDA graph makes the whole batch."""
        device, gather = self._labels.device, self._gather_in(epoch)
        keys = self.pipeline.keys_of(epoch).to(device)
        # On a GPU, drawing for all samples costs as much as for one batch. On a CPU it would only take memory.
        drawn = self.pipeline.draw(shares, keys).unbind(-2) if device.type == "cuda" else None
        samples = samples_of(shares)
        for number in range(len(shares)):
            ids = samples[number]
            inputs, labels = gather(ids, drawn[number] if drawn else self.pipeline.draw(shares[number], keys))
            yield ids, inputs, labels

    def _gather_in(self, epoch: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Makes batches of an epoch. A CUDA graph has one input size; another size gets a graph of its own."""
        pipeline = self.pipeline.in_epoch(epoch)
        plain = partial(self._gather_plainly, pipeline)
        if not self._records:
            return plain
        if self._recorded is None or self._recorded[0] != pipeline.image_size:
            self._recorded = pipeline.image_size, Recorded(plain)
        return self._recorded[1]

    def _gather_plainly(self, pipeline: Pipeline, ids: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        inputs = pipeline.augment(self._dataset.read(ids), drawn)
        return pipeline.mix(inputs, self._labels[ids], drawn)

    def _read_batches(self, shares: Tensor, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        device, pipeline = self._labels.device, self.pipeline.in_epoch(epoch)
        keys = pipeline.keys_of(epoch).to(device)
        reads = self._read_ahead(list(samples_of(shares).cpu()), lambda number: pipeline.crops(shares[number], epoch))
        parts = zip(shares, reads, strict=True)
        for share, (ids, samples) in parts:
            here = ids.to(device)
            drawn = pipeline.draw(share, keys)
            inputs = pipeline.augment(samples, drawn)
            yield ids, *pipeline.mix(inputs, self._labels[here], drawn)

    def evaluation_batches(self, batch_size: int, *, shares_per_rank: int = 1) -> Iterator[EvaluationBatch]:
        """Every sample once over all ranks, and the same number of batches on each rank.

        Sharded models exchange weights in every forward pass. A rank with a shorter share therefore runs a
        padding batch that is not counted. A rank may have several shares (its lanes).
        """
        shares = even_shares(len(self.ids), self._world.world_size * shares_per_rank)
        batches_per_share = -(-max(len(share) for share in shares) // batch_size)
        first = self._world.rank * shares_per_rank
        parts = [
            (number, self.ids[share[start * batch_size : (start + 1) * batch_size]])
            for number, share in enumerate(shares[first : first + shares_per_rank])
            for start in range(batches_per_share)
        ]
        self._announce(self.ids)
        padded = [ids if len(ids) else self.ids[:1] for _, ids in parts]
        for (number, part), (ids, samples) in zip(parts, self._read_ahead(padded), strict=True):
            labels = self._labels[ids.to(self._labels.device)]
            inputs = self.pipeline.for_evaluation(samples)
            yield EvaluationBatch(inputs, labels, share=number, is_counted=len(part) > 0)

    def _announce(self, ids: Tensor) -> None:
        """Tell a data set that fetches its files which samples all ranks read now, in their order."""
        announce = getattr(self._dataset, "announce", None)
        if announce is not None:
            announce(ids.flatten())

    def _read_ahead(
        self, shares: list[Tensor], crops: Callable[[int], Crops | None] = lambda number: None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(self._dataset, ResidentDataset):
            return ((ids, self._dataset.read(ids)) for ids in shares)
        return read_ahead(self._dataset, shares, self._world.device, self._watch, crops)


def _make_resident(dataset: Dataset, device: str) -> Dataset:
    """Copy a data set to the GPU if it takes at most a quarter of the free memory. It is then never read again."""
    size_bytes = dataset.samples.nbytes if isinstance(dataset, ResidentDataset) else getattr(dataset, "nbytes", None)
    if size_bytes is None or not device.startswith("cuda"):
        return dataset
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if size_bytes <= free_bytes // 4:
        return _on_gpu(dataset, device)
    return _OnHost(dataset) if isinstance(dataset, ResidentDataset) else dataset


def _on_gpu(dataset: Dataset, device: str) -> ResidentDataset:
    if isinstance(dataset, ResidentDataset):
        return ResidentDataset(dataset.samples.to(device), dataset.labels)
    one = dataset.read(torch.arange(1))
    samples = torch.empty((len(dataset), *one.shape[1:]), dtype=one.dtype, device=device)
    for place, ids in zip(
        samples.split(_COPIED_AT_ONCE), torch.arange(len(dataset)).split(_COPIED_AT_ONCE), strict=True
    ):
        place.copy_(dataset.read(ids))
    return ResidentDataset(samples, dataset.labels)


class _OnHost:
    """A resident data set that is too large for the GPU. Batches are gathered in host memory ahead of the loop."""

    if_slow = "a GPU that holds the data set, or fewer ranks on this machine"

    def __init__(self, dataset: ResidentDataset) -> None:
        self._dataset = dataset

    @property
    def labels(self) -> Tensor:
        return self._dataset.labels

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Tensor) -> Tensor:
        return self._dataset.read(indices)
