"""Create `cifar-10-batches-py`, in the format of the official files and in formats of Python 3."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.sources import cifar10

FORMS = ("official", "2 text", "2 bytes", "3 bytes", "4 text", "5 text", "5 bytes")


def pickle_batch(labels: list[int], pixels: NDArray[np.uint8], form: str = "official") -> bytes:
    """`form`: official, or the protocol and whether keys are text or bytes."""
    names = [f"picture_{number}.png" for number in range(len(labels))]
    if form == "official":
        return official_batch(labels, pixels, names)
    protocol, keys = form.split()
    batch = {"batch_label": "training batch 1 of 5", "labels": labels, "data": pixels, "filenames": names}
    return pickle.dumps({_key(key, keys): value for key, value in batch.items()}, protocol=int(protocol))


def _key(text: str, kind: str) -> str | bytes:
    return text.encode() if kind == "bytes" else text


def official_batch(labels: list[int], pixels: NDArray[np.uint8], names: list[str]) -> bytes:
    """Protocol 2 with strings of Python 2, which Python 3 cannot write."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85U\x01b\x87R"
        + (b"(K\x01" + _number(pixels.shape[0]) + _number(pixels.shape[1]) + b"\x86")
        + b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + (b"\x89T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes() + b"tb")
    )
    return (
        (b"\x80\x02}q\x01(" + _text("batch_label") + b"q\x02" + _text("training batch 1 of 5") + b"q\x03")
        + (_text("labels") + b"q\x04]q\x05(" + b"".join(map(_number, labels)) + b"e")
        + (_text("data") + array)
        + (_text("filenames") + b"]q\x09(" + b"".join(map(_text, names)) + b"e")
        + b"u."
    )


def _text(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def _number(number: int) -> bytes:
    return b"K" + bytes([number]) if number < 256 else b"M" + struct.pack("<H", number)


def pickle_binary_folder(binary: Path, target: Path, form: str = "official") -> None:
    """Convert every file of a binary folder to the pickled format."""
    target.mkdir(parents=True, exist_ok=True)
    for name, pickled in zip(cifar10.FILES, cifar10.PICKLED_FILES, strict=True):
        records = np.fromfile(binary / name, np.uint8).reshape(-1, cifar10.RECORD_BYTES)
        pixels = np.ascontiguousarray(records[:, 1:])
        (target / pickled).write_bytes(pickle_batch(records[:, 0].tolist(), pixels, form))
