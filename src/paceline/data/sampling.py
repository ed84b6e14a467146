"""Which samples an epoch visits, and in which order, as a pure function of (seed, epoch).

The result does not depend on rank or world size. A sample that an epoch visits more than once has a repetition number
for each visit. Augmentation draws from it, so repeated samples get different pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.data.dataset import Dataset, Windows
from paceline.data.draws import draw_below, draw_bits, draw_permutation, unit
from paceline.data.keep import Selection
from paceline.data.order import draw_keys, epoch_order, repeat_in_batches, sort_by_windows
from paceline.errors import UserError
from paceline.settings.schema import DataConfig

UNIFORM, BALANCED, WEIGHTED = "uniform", "balanced", "weighted"
_REPEATED, _CLASS, _SHUFFLED, _WEIGHTED = 3, 4, 5, 6  # part of the hash, so draws for different purposes differ
_REPLACED = 9
_FIRST_FILLED = 2**15  # a repetition number that no epoch reaches otherwise; times 64 repeats it fits into a draw key


@dataclass(frozen=True)
class Visits:
    """The order of an epoch."""

    positions: Tensor  # of the samples, among those that are trained on
    repetitions: Tensor | None  # how often the epoch has visited the sample before; None: every sample once at most


@dataclass(frozen=True)
class Sampling:
    """How the samples of an epoch are chosen."""

    num_samples: int
    kind: str = UNIFORM
    epoch_samples: int = 0  # 0: as many as there are samples
    labels: Tensor | None = None  # of the samples, for balanced
    weights: Tensor | None = None  # of the samples, for weighted
    kept: Selection | None = None  # --keep-share
    excluded: Tensor | None = None  # bool, for each sample: other samples take its places
    blocks: Tensor | None = None  # the data file of each sample, if only `window` files are read at a time
    window: int = 0

    @property
    def length(self) -> int:
        if self.kept is not None:
            return self.kept.length
        return self.epoch_samples or self.num_samples

    def visits(self, seed: int, epoch: int, device: str | torch.device = "cpu") -> Visits:
        found = self._visits(seed, epoch, device)
        if self.blocks is None:
            return found
        order = sort_by_windows(self.blocks.to(device)[found.positions], self.window, seed, epoch)
        return Visits(found.positions[order], None if found.repetitions is None else found.repetitions[order])

    def _visits(self, seed: int, epoch: int, device: str | torch.device) -> Visits:
        if self.kept is not None:
            positions = self.kept.positions(seed, epoch)
            return Visits(positions.to(device)[epoch_order(len(positions), seed, epoch, device)], None)
        if self.kind == UNIFORM and self.length <= self.num_samples:
            return Visits(epoch_order(self.num_samples, seed, epoch, device)[: self.length], None)
        if self.kind == UNIFORM:
            found = self._repeated(torch.arange(self.num_samples), self.length, seed, epoch)
        elif self.kind == BALANCED:
            found = self._balanced(seed, epoch)
        else:
            found = self._weighted(seed, epoch)
        return Visits(*(part.to(device) for part in found))

    def batches(self, ids: Tensor, seed: int, epoch: int, global_batch_size: int, repeats: int = 1) -> Tensor:
        """The draw keys of an epoch's global batches, on the device of `ids`. `ids`: of all samples to choose from."""
        found = self.visits(seed, epoch, ids.device)
        if self.excluded is not None:
            found = _fill_places(found, self.excluded.to(ids.device), seed, epoch)
        keys = ids[found.positions]
        if found.repetitions is not None:
            keys = draw_keys(keys, found.repetitions)
        return repeat_in_batches(keys, global_batch_size, repeats)

    def _repeated(self, members: Tensor, count: int, seed: int, epoch: int, *context: int) -> tuple[Tensor, Tensor]:
        """All members in random order, then all again in another order, until there are enough."""
        rounds = -(-count // len(members))
        orders = [draw_permutation(len(members), _REPEATED, seed, epoch, number, *context) for number in range(rounds)]
        repetitions = torch.arange(rounds).repeat_interleave(len(members))
        return members[torch.cat(orders)][:count], repetitions[:count]

    def _balanced(self, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Every class equally often (or once more), and inside a class every sample equally often (or once more)."""
        assert self.labels is not None
        groups = [torch.nonzero(self.labels == label)[:, 0] for label in self.labels.unique().tolist()]
        # Some classes get one visit more. They are other ones in every epoch.
        turn = draw_permutation(len(groups), _CLASS, seed, epoch).tolist()
        counts = [(self.length + place) // len(groups) for place in turn]
        parts = [
            self._repeated(group, count, seed, epoch, number)
            for number, (group, count) in enumerate(zip(groups, counts, strict=True))
            if count
        ]
        positions, repetitions = (torch.cat(column) for column in zip(*parts, strict=True))
        order = draw_permutation(self.length, _SHUFFLED, seed, epoch)
        return positions[order], repetitions[order]

    def _weighted(self, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Each visit is drawn by weight, with replacement."""
        assert self.weights is not None
        sums = np.cumsum(self.weights.double().numpy())  # numpy adds in order: the same bits on every machine
        drawn = unit(draw_bits(torch.arange(self.length), _WEIGHTED, seed, epoch)).numpy() * sums[-1]
        # The last sample with a weight is the limit: rounding may give the whole sum.
        last = int(np.searchsorted(sums, sums[-1], side="left"))
        positions = torch.from_numpy(np.minimum(np.searchsorted(sums, drawn, side="right"), last))
        return positions, _count_earlier(positions)


def _fill_places(found: Visits, excluded: Tensor, seed: int, epoch: int) -> Visits:
    """Give the places of excluded samples to other samples, drawn by (seed, epoch, place). All other places stay.

    The new visits have repetition numbers that no other visit has, so they get other pixels.
    """
    places = torch.nonzero(excluded[found.positions])[:, 0]
    kept = torch.nonzero(~excluded)[:, 0]
    repetitions = torch.zeros_like(found.positions) if found.repetitions is None else found.repetitions.clone()
    positions = found.positions.clone()
    positions[places] = kept[draw_below(len(kept), places, _REPLACED, seed, epoch)]
    repetitions[places] = _FIRST_FILLED + torch.arange(len(places), device=places.device) % _FIRST_FILLED
    return Visits(positions, repetitions)


def _count_earlier(positions: Tensor) -> Tensor:
    """For each entry, how many entries before it are equal to it."""
    sorted_positions, order = positions.sort(stable=True)
    places = torch.arange(len(positions))
    is_first = torch.ones_like(sorted_positions, dtype=torch.bool)
    is_first[1:] = sorted_positions[1:] != sorted_positions[:-1]
    starts = torch.where(is_first, places, torch.zeros_like(places)).cummax(0).values
    return torch.empty_like(places).scatter_(0, order, places - starts)


def build_sampling(kind: str, epoch_samples: int, labels: Tensor, weights: Tensor | None) -> Sampling:
    """`labels` and `weights`: of the samples that are trained on."""
    if kind == WEIGHTED:
        if weights is None:
            raise UserError(
                "weighted sampling needs a weight of each training sample, and this data has none",
                where="--sampling",
                allowed="a column weight in train.csv, or (samples, labels, weights) from a data set function",
            )
        wrong = ~(weights.isfinite() & (weights >= 0))
        if bool(wrong.any()) or not bool((weights > 0).any()):
            first = int(wrong.nonzero()[0]) if bool(wrong.any()) else 0
            raise UserError(
                "a sample weight cannot be used",
                where=f"training sample {first}",
                got=float(weights[first]),
                allowed="0 or more, and more than 0 for at least one sample",
            )
    return Sampling(
        num_samples=len(labels),
        kind=kind,
        epoch_samples=epoch_samples,
        labels=labels if kind == BALANCED else None,
        weights=weights if kind == WEIGHTED else None,
    )


def sampling_of(config: DataConfig, dataset: Dataset, ids: Tensor, excluded: Tensor | None = None) -> Sampling:
    """The sampling of a run that trains on the samples `ids` of this data set, without those of `excluded`."""
    weights = getattr(dataset, "sample_weights", None)
    weights = weights[ids] if weights is not None else None
    sampling = build_sampling(config.sampling, config.epoch_samples, dataset.labels[ids], weights)
    windows: Windows | None = getattr(dataset, "windows", None)
    if windows is not None:
        sampling = replace(sampling, blocks=windows.blocks[ids], window=windows.size)
    is_out = torch.isin(ids, excluded) if excluded is not None else None
    return replace(sampling, excluded=is_out) if is_out is not None and bool(is_out.any()) else sampling
