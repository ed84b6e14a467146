"""The data of a run: what it is, which samples are kept for validation, and whether a resume meets it again."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.store import Checkpoint
from paceline.data.dataset import LoadedData
from paceline.data.fingerprint import (
    Fingerprint,
    are_samples_changed,
    differences,
    fingerprint_of,
    pack_keys,
    sample_keys,
    split_by_keys,
    unpack_keys,
)
from paceline.data.parts import PARTS, TEST, TRAIN
from paceline.errors import CheckpointError, UserError
from paceline.parallel.collectives import gather_texts
from paceline.runtime.detect import World

_log = logging.getLogger("paceline")
POSITIONS, _KEYS = "positions", "keys"
_PART_FIELDS = {"samples": int, "labels": str, "kind": str, "contents": str}
_HINT = "give the data it was trained with, or --init-from to start a new run from its weights"


@dataclass(frozen=True)
class RunData:
    """A part of every checkpoint's state."""

    fingerprint: Fingerprint
    split: str = POSITIONS  # what decides a sample's side: its position, or, after the data has changed, its key
    held_out: str | None = None  # keys of the validation samples; None where samples have none
    accepted: list[dict[str, Any]] = field(default_factory=list)  # changes that the user has accepted: step, what

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any, where: str) -> RunData:
        try:
            found = cls(**values)
            parts = [found.fingerprint[part] for part in PARTS if part in (TRAIN, TEST, *found.fingerprint)]
            is_sound = all(isinstance(part[name], kind) for part in parts for name, kind in _PART_FIELDS.items())
            differences(found.fingerprint, found.fingerprint)
            if found.held_out is not None:
                unpack_keys(found.held_out)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise _unreadable(where, f"{type(error).__name__}: {error}") from error
        if not is_sound or found.split not in (POSITIONS, _KEYS) or not isinstance(found.accepted, list):
            raise _unreadable(where, "values of other types")
        return found

    @property
    def is_split_by_keys(self) -> bool:
        return self.split == _KEYS


def _unreadable(where: str, got: str) -> CheckpointError:
    return CheckpointError("what this checkpoint says of its data cannot be read", where=where, got=got, hint=_HINT)


def agree_on_data(data: LoadedData, world: World) -> Fingerprint:
    """The data's fingerprint, made by the first rank of every node and compared. Collective."""
    mine = json.dumps(fingerprint_of(data)) if world.local_rank == 0 else ""
    nodes = [json.loads(text) for text in gather_texts(mine, world) if text]
    for other in nodes[1:]:
        if found := differences(nodes[0], other):
            raise UserError(
                "the nodes do not have the same data",
                got="\n".join(found),
                hint="give every node the same data",
            )
    first: Fingerprint = nodes[0]
    return first


def describe_split(data: LoadedData, train: Tensor, validation: Tensor) -> str | None:
    """The keys of validation samples, as a checkpoint keeps them; not of those that are also trained on."""
    keys = sample_keys(data.train) if len(validation) else None
    if keys is None:
        return None
    own_keys = keys if data.validation is None else sample_keys(data.validation)
    if own_keys is None:
        return None
    held_out = own_keys[validation]
    return pack_keys(held_out[~torch.isin(held_out, keys[train])])


def data_to_go_on_with(checkpoint: Checkpoint, own: RunData, *, may_differ: bool, has_validation: bool) -> RunData:
    """The data of the checkpoint, if this run has the same data. With --accept-new-data also if it differs."""
    where = str(checkpoint.path)
    if "data" not in checkpoint.state:
        _log.info("note: the checkpoint does not say what data it was trained with; it is taken to be this data")
        return own
    saved = RunData.from_json(checkpoint.state["data"], where)
    found = differences(saved.fingerprint, own.fingerprint)
    if not found:
        return replace(saved, fingerprint=own.fingerprint)
    if not may_differ:
        raise CheckpointError(
            "this is not the data that the run was trained with",
            where=where,
            got="\n".join(found),
            hint=f"{_HINT};\n--accept-new-data continues with this data",
        )
    _log.warning("warning: continuing with other data than before: %s", "; ".join(found))
    change = {"step": checkpoint.step, "differs": found}
    now = replace(saved, fingerprint=own.fingerprint, accepted=[*saved.accepted, change])
    if not has_validation or not are_samples_changed(saved.fingerprint, own.fingerprint):
        return now
    if saved.held_out is None:
        raise CheckpointError(
            "the new data may have samples in its validation set that the run was trained with",
            where=where,
            got="samples of this data set cannot be identified (only those in memory and in folders can)",
            hint=_HINT,
        )
    return replace(now, split=_KEYS)


def split_again(samples: LoadedData, data: RunData) -> tuple[Tensor, Tensor]:
    """After the data has changed: samples kept for validation before still are; every other one is trained on.

    Samples that are new in a validation set of the data's own are left out: the run may have been trained with them.
    """
    keys = sample_keys(samples.train)
    own_keys = keys if samples.validation is None else sample_keys(samples.validation)
    if keys is None or own_keys is None or data.held_out is None:
        raise CheckpointError("samples of the new data cannot be identified", hint=_HINT)
    held_out = unpack_keys(data.held_out)
    train, _ = split_by_keys(keys, held_out)
    new, validation = split_by_keys(own_keys, held_out)
    if samples.validation is not None and len(new):
        _log.warning(
            "warning: %d new validation samples are left out: the run may have been trained with them", len(new)
        )
    if not len(validation) or not len(train):
        part = "validation" if not len(validation) else "training"
        raise CheckpointError(
            f"no sample of the new data belongs to the run's {part} set",
            got=f"{len(own_keys):,} samples, all of them new" if part == "validation" else f"{len(keys):,} samples",
            hint=_HINT,
        )
    return train, validation
