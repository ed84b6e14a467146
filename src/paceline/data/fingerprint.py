"""The fingerprint of a data set: a few hundred bytes in every checkpoint, to check that a resume has the same data.

It depends on samples, labels and class names in their order, not on a path, a time, a machine or the number of
ranks. Data in memory is read completely. For pictures in folders the names and sizes count, for packed pictures the
stored checksums. The keys of samples identify the samples that a run keeps for validation.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.dataset import Dataset, LoadedData, ResidentDataset, Windows
from paceline.data.draws import draw_bits
from paceline.data.pack_format import crc32_of
from paceline.data.parts import TEST, TRAIN, VALIDATION

Fingerprint = dict[str, Any]
_PROBES = 64  # samples to read if reading the complete data set would take too long
_WORD_BYTES = 8
_ROWS_AT_ONCE = 4096
_MOST_KEYS = 2**20  # 8 MB: more would make every checkpoint's state too large
_NAMES = {
    "pixels": "pixels or values",
    "files": "names or sizes of the files",
    "shards": "checksums of the packed pictures",
    "probes": "values, of those that were looked at",
}


def fingerprint_of(data: LoadedData) -> Fingerprint:
    """Can be written as JSON. Takes a hundredth of a second for a data set like CIFAR-10."""
    return {
        "classes": _digest(json.dumps(data.info.classes).encode()),
        "num_classes": data.info.num_classes,
        "sample_shape": list(data.info.sample_shape),
        **{name: _part(part) for name, part in data.parts()},
    }


def differences(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """What differs, as text for the user. Empty if the fingerprints show no difference."""
    lines = _differences_of_all(saved, now)
    for part in (TRAIN, VALIDATION, TEST):
        lines += _part_differences(part, saved, now)
    windows = [fingerprint[TRAIN].get("window", "all samples") for fingerprint in (saved, now)]
    if windows[0] != windows[1]:
        lines.append(f"order: shuffled over {windows[0]} then, over {windows[1]} now (--cache-gb)")
    # Only pictures have a decoder. Fingerprints of the first one do not name it.
    then, here = (fingerprint[TRAIN].get("decoder", 1) for fingerprint in (saved, now))
    if then != here:
        lines.append(
            f"pixels: pictures were decoded by rules {then}, now by rules {here} (EXIF, transparency, library)"
        )
    return lines


def are_samples_changed(saved: Fingerprint, now: Fingerprint) -> bool:
    """Whether other samples may be trained on or validated with. Other pixels of the same pictures do not count."""
    return bool(
        _differences_of_all(saved, now)
        or _part_differences(TRAIN, saved, now)
        or _part_differences(VALIDATION, saved, now)
    )


def _differences_of_all(saved: Fingerprint, now: Fingerprint) -> list[str]:
    lines = []
    if saved["classes"] != now["classes"]:
        lines.append(f"class names: {saved['num_classes']} then, {now['num_classes']} now, not the same in this order")
    if saved["sample_shape"] != now["sample_shape"]:
        lines.append(f"shape of a sample: {saved['sample_shape']} then, {now['sample_shape']} now")
    return lines


def _part_differences(part: str, saved: Fingerprint, now: Fingerprint) -> list[str]:
    then, here = saved.get(part), now.get(part)
    is_split = part == TRAIN and VALIDATION not in saved and VALIDATION not in now
    words = "training and validation samples" if is_split else f"{part.replace('train', 'training')} samples"
    if then is None or here is None:
        origin = ["a set of their own" if found else "held out of the training samples" for found in (then, here)]
        return [f"{words}: {origin[0]} then, {origin[1]} now"] if then or here else []
    lines = []
    if then["samples"] != here["samples"]:
        lines.append(f"{words}: {then['samples']:,} then, {here['samples']:,} now")
    elif then["labels"] != here["labels"]:
        lines.append(f"{words}: other labels")
    # Pictures in folders and the same pictures packed cannot be compared without decoding them.
    is_comparable = then["kind"] == here["kind"] and then["samples"] == here["samples"]
    if is_comparable and then["contents"] and here["contents"] and then["contents"] != here["contents"]:
        lines.append(f"{words}: other {_NAMES.get(here['kind'], 'contents')}")
    return lines


def _part(dataset: Dataset) -> Fingerprint:
    kind, contents = _contents(dataset)
    labels = _digest(dataset.labels.contiguous().numpy().tobytes())
    found = {"samples": len(dataset), "labels": labels, "kind": kind, "contents": contents}
    windows: Windows | None = getattr(dataset, "windows", None)
    if windows is not None:
        found["window"] = f"{windows.size} of {windows.num_blocks} data files at a time"
    decoder = getattr(dataset, "decoder", None)
    return found if decoder is None else {**found, "decoder": decoder}


def _contents(dataset: Dataset) -> tuple[str, str]:
    if isinstance(dataset, ResidentDataset):
        samples = dataset.samples.cpu().contiguous()
        return "pixels", f"{samples.dtype}-{crc32_of(samples.view(torch.uint8).flatten().numpy()):08x}"
    contents = getattr(dataset, "contents", None)  # of encoded pictures
    if contents is not None:
        kind, digest = contents()
        return kind, digest
    checksums = getattr(dataset, "checksums", None)
    if checksums is not None:
        return "shards", _digest(json.dumps(checksums).encode())
    some = torch.linspace(0, len(dataset) - 1, min(_PROBES, len(dataset))).long()
    first, second = (dataset.read(some).contiguous().numpy().tobytes() for _ in range(2))
    return "probes", _digest(first) if first == second else ""  # a data set with its own augmentation has no digest


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# --- Which samples are which


def sample_keys(dataset: Dataset) -> Tensor | None:
    """A number (int64) for each sample, computed from this sample only. None if samples cannot be identified."""
    if isinstance(dataset, ResidentDataset):
        return _keys_of_rows(dataset.samples)
    names = getattr(dataset, "names", None)
    if names is None:
        return None
    digests = b"".join(hashlib.blake2b(name, digest_size=_WORD_BYTES).digest() for name in names())
    return torch.frombuffer(bytearray(digests), dtype=torch.int64) if digests else torch.zeros(0, dtype=torch.int64)


def _keys_of_rows(samples: Tensor) -> Tensor:
    rows = samples.cpu().reshape(len(samples), -1).contiguous().view(torch.uint8)
    words = -(-rows.shape[1] // _WORD_BYTES)
    factors = draw_bits(torch.arange(words), 1) | 1
    keys = []
    for part in rows.split(_ROWS_AT_ONCE):
        padded = torch.nn.functional.pad(part, (0, words * _WORD_BYTES - part.shape[1])).contiguous()
        keys.append((padded.view(torch.int64) * factors).sum(1))
    return draw_bits(torch.cat(keys), 2) if keys else torch.zeros(0, dtype=torch.int64)


def pack_keys(keys: Tensor | None) -> str | None:
    """Keys as text for JSON. None if there are none, or too many."""
    if keys is None or len(keys) > _MOST_KEYS:
        return None
    return base64.b64encode(keys.sort().values.numpy().astype("<i8").tobytes()).decode()


def unpack_keys(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), dtype="<i8").astype(np.int64))


def split_by_keys(keys: Tensor, held_out: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the samples that were not held out before, and of those that were."""
    is_held_out = torch.isin(keys, held_out)
    ids = torch.arange(len(keys))
    return ids[~is_held_out], ids[is_held_out]
