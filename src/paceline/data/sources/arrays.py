"""Arrays that `paceline.train` has written for its ranks: `write_arrays` writes them once, every rank maps the files.

The ranks of a node share the pages of the files. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from paceline.data.adapt import describe_parts
from paceline.data.array_folder import (
    ARRAYS,
    HEADER,
    ArrayHeader,
    ArrayPart,
    header_json,
    labels_file,
    read_header,
    samples_file,
)
from paceline.data.dataset import Dataset, DatasetInfo, LoadedData, ResidentDataset
from paceline.data.targets import as_targets
from paceline.errors import DataError, UserError
from paceline.runs.drafts import abandoned_drafts, draft_of
from paceline.runs.folder import flush, write_json
from paceline.settings.schema import DataConfig
from paceline.settings.tasks import SINGLE_LABEL

_CHUNK_BYTES = 32_000_000
_DIGEST_BYTES = 8


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return load(config, seed).info


def load(config: DataConfig, seed: int) -> LoadedData:
    folder = Path(config.data_dir)
    header = read_header(folder)
    parts = {name: _map_part(folder, name, part, header) for name, part in header.parts.items()}
    info = describe_parts(parts, header.classes, ARRAYS, header.task)
    return LoadedData(replace(info, folders=header.origins), **parts)


def _map_part(folder: Path, name: str, about: ArrayPart, header: ArrayHeader) -> Dataset:
    samples, columns = _map(folder / samples_file(name), about.shape, about.dtype), len(header.classes)
    if header.task != SINGLE_LABEL:
        targets = _map(folder / labels_file(name), (about.shape[0], columns), "float32")
        try:
            return ResidentDataset(samples, as_targets(targets, header.task))
        except UserError as error:
            raise _damaged(folder / labels_file(name), error.got) from error
    labels = _map(folder / labels_file(name), about.shape[:1], "int64")
    if int(labels.min()) < 0 or int(labels.max()) >= columns:
        raise _damaged(folder / labels_file(name), f"labels from {int(labels.min())} to {int(labels.max())}")
    return ResidentDataset(samples, labels)


def _map(path: Path, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Map an .npy file of exactly this shape and type. Other files are not mapped."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would wait for a writer
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("another version of the format")
            found = np.lib.format.read_array_header_1_0(file)
            start, size = file.tell(), os.fstat(file.fileno()).st_size
    except Exception as error:  # numpy raises many types for a damaged header, some of them of Python's tokenizer
        raise _damaged(path, error) from error
    if found != (shape, False, np.dtype(dtype)):
        raise _damaged(path, f"{found[2]} of shape {found[0]}, not {dtype} of shape {shape} as arrays.json says")
    if size != start + math.prod(shape) * np.dtype(dtype).itemsize:
        raise _damaged(path, f"{size:,} bytes")
    # "c": private pages. torch does not take arrays that cannot be written; nothing writes to them.
    return torch.from_numpy(np.memmap(path, dtype, "c", start, shape))


def _damaged(path: Path, got: object) -> DataError:
    return DataError(
        "an array of this run cannot be read",
        where=str(path),
        got=got,
        hint="give the data again: paceline.train(data=(x, y), output_dir=RUN, resume='auto', ...)",
    )


# --- Writing


def header_of(data: LoadedData, *, is_test_held_out: bool) -> ArrayHeader:
    dtype = "float32" if data.info.is_float else "uint8"
    parts = {name: ArrayPart((len(part), *data.info.sample_shape), dtype) for name, part in data.parts()}
    return ArrayHeader(data.info.classes, parts, is_test_held_out, data.info.task)


def write_header(folder: Path, header: ArrayHeader) -> None:
    write_json(folder / HEADER, header_json(header))


def write_arrays(data: LoadedData, header: ArrayHeader, parent: Path) -> Path:
    """Write all parts to a new folder in `parent`, named by its contents. Arrays that are there already are kept.

    Raises UserError for values that are not finite, and if the disk is full. Then nothing is left.
    """
    draft = draft_of(parent / "new")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for path in abandoned_drafts(parent):
            shutil.rmtree(path, ignore_errors=True)
        draft.mkdir()
        digest = hashlib.blake2b(json.dumps(header_json(header)).encode(), digest_size=_DIGEST_BYTES)
        for name, part in data.parts():
            with (draft / samples_file(name)).open("xb") as file:
                _write_samples(file, part, name, header.parts[name], digest)
            with (draft / labels_file(name)).open("xb") as file:
                _write_array_header(file, tuple(part.labels.shape), str(part.labels.dtype).removeprefix("torch."))
                _write(file, part.labels, digest)
        write_header(draft, header)
        target = parent / digest.hexdigest()
        if not target.is_dir():
            flush(draft)
            draft.rename(target)
            flush(parent)
        return target
    except OSError as error:
        raise UserError(
            "the data cannot be written for the ranks", where=str(parent), got=error.strerror, hint="another output_dir"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_samples(file: BinaryIO, part: Dataset, name: str, about: ArrayPart, digest: hashlib.blake2b) -> None:
    _write_array_header(file, about.shape, about.dtype)
    ids_in_data = getattr(part, "ids_in_data", lambda ids: ids)  # a part that was held out: the numbers that users know
    for ids in chunks(part):
        samples = part.read(ids)
        if tuple(samples.shape[1:]) != about.shape[1:] or str(samples.dtype) != f"torch.{about.dtype}":
            raise UserError(
                "the samples differ in shape or type",
                where=f"{name} part, sample {int(ids[0])}",
                got=f"{samples.dtype} of shape {tuple(samples.shape[1:])}",
                allowed=f"torch.{about.dtype} of shape {about.shape[1:]}, as sample 0 has",
            )
        require_finite(samples, ids_in_data(ids), name)
        _write(file, samples, digest)
    file.flush()
    os.fsync(file.fileno())


def chunks(part: Dataset) -> tuple[Tensor, ...]:
    """The numbers of all samples, cut into parts of some megabytes."""
    one = part.read(torch.tensor([0]))
    found: tuple[Tensor, ...] = torch.arange(len(part)).split(max(1, _CHUNK_BYTES // one.nbytes))
    return found


def require_finite(samples: Tensor, ids: Tensor, part: str) -> None:
    if not samples.dtype.is_floating_point:
        return
    is_bad = ~samples.isfinite().flatten(1).all(1)
    if bool(is_bad.any()):
        first = int(is_bad.int().argmax())
        values = samples[first]
        raise UserError(
            "a sample has a value that is not finite in float32",
            where=f"{part} part, sample {int(ids[first])}",
            got=f"{values[~values.isfinite()][0].item()}; {int(is_bad.sum())} of {len(ids)} samples looked at",
            allowed="finite numbers",
            hint="np.isfinite(x) finds them; np.nan_to_num(x) replaces them",
        )


def _write_array_header(file: BinaryIO, shape: tuple[int, ...], dtype: str) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _write(file: BinaryIO, values: Tensor, digest: hashlib.blake2b) -> None:
    content = values.contiguous().view(-1).view(torch.uint8).numpy().data
    digest.update(content)
    file.write(content)
