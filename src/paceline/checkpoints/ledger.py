"""A record of every checkpoint that a run has saved, also of those that were dropped later: `checkpoints.jsonl`.

A row has the step and SHA-256 hashes of the tensors, by kind, and of the state. It also has the hash of the row before
it, so the rows form a chain. A run that returns to an earlier step cuts off the later rows and continues the chain.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.format import STATE
from paceline.checkpoints.payload import PayloadReader, Piece
from paceline.checkpoints.store import Checkpoint, inspect_checkpoint
from paceline.parallel.parts import bits
from paceline.runs.folder import write_atomically
from paceline.runs.json_files import read_objects
from paceline.runs.receipt import ENTRY, NO_HASH, hash_link

_log = logging.getLogger("paceline")
Entry = dict[str, Any]


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the tensors' bytes in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(bits(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_entry(entry: Entry) -> str:
    return hash_link(
        entry["previous"], {name: value for name, value in entry.items() if name not in ("previous", "hash")}
    )


def hash_checkpoint(checkpoint: Checkpoint) -> dict[str, str]:
    """The hashes of the tensors of a stored checkpoint, by kind. Slices of ranks are joined first."""
    hashes = {}
    for kind in sorted({name.split(".")[0].split("-")[0] for name in checkpoint.manifest.files if name != STATE}):
        reader = PayloadReader(checkpoint.path, checkpoint.files_of(kind))
        hashes[kind] = hash_tensors({name: reader.read(name) for name in reader.shapes})
    return hashes


def hash_stored(path: Path) -> dict[str, str]:
    return hash_checkpoint(inspect_checkpoint(path))


def hash_state(path: Path) -> str:
    """Of the state of the checkpoint in this folder."""
    return hashlib.sha256((path / STATE).read_bytes()).hexdigest()


def read_ledger(path: Path) -> list[Entry]:
    """All complete rows. The caller checks the chain."""
    return read_objects(path, ENTRY)


class Ledger:
    """The record of the run in this process. Only the primary writes it. A write error does not end the training."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, checkpoint: Path, tensors: dict[str, str], about: dict[str, Any]) -> None:
        """A checkpoint was committed to this folder."""
        step = int(about["step"])
        with _warned():
            entries = [entry for entry in read_ledger(self._path) if entry["step"] < step]
            entry = {
                "step": step,
                "tensors": tensors,
                "state": hash_state(checkpoint),
                "config": str(about.get("config_hash", "")),
                "ranks": int(about.get("world_size", 0)),
                "previous": entries[-1]["hash"] if entries else NO_HASH,
            }
            self._write([*entries, {**entry, "hash": hash_entry(entry)}])

    def cut_after(self, step: int) -> None:
        """The run starts here, or continues after this step."""
        with _warned():
            entries = read_ledger(self._path)
            if any(entry["step"] > step for entry in entries):
                self._write([entry for entry in entries if entry["step"] <= step])

    def take_over(self, checkpoint: Checkpoint, earlier: Path) -> None:
        """The run continues from this checkpoint. `earlier`: the record of the run that saved it.

        A process may be killed after it has committed a checkpoint and before it has recorded it.
        """
        with _warned():
            entries = read_ledger(self._path) or [e for e in read_ledger(earlier) if e["step"] <= checkpoint.step]
            self._write(entries)
            if not any(entry["step"] == checkpoint.step for entry in entries):
                about = {**checkpoint.manifest.about, "step": checkpoint.step}
                self.add(checkpoint.path, hash_checkpoint(checkpoint), about)

    def _write(self, entries: list[Entry]) -> None:
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        write_atomically(self._path, text, is_durable=False)


def hash_pieces(pieces: dict[str, dict[str, Piece]]) -> dict[str, str]:
    """The hashes of whole tensors in memory, by kind."""
    return {kind: hash_tensors({name: piece.values for name, piece in part.items()}) for kind, part in pieces.items()}


@contextmanager
def _warned() -> Iterator[None]:
    """A record that cannot be written does not end a run. The receipt says what it does not prove."""
    try:
        yield
    except (OSError, ValueError) as error:
        _log.warning("warning: checkpoints.jsonl cannot be written: %s; training continues without it", error)
