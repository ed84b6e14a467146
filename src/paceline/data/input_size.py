"""Parses the shape of a synthetic sample: `784` or `3x32x32`.

Imports no torch, so a wrong shape is found before anything starts.
"""

from __future__ import annotations

import math
import re

from paceline.errors import UserError

MAX_BYTES = 2**28  # of all samples together: synthetic data is for quick tests
SHAPES_MAX_BYTES = 2**32
SHAPES_SAMPLE = (3, 32, 32)


def parse_input_size(text: str) -> tuple[int, ...]:
    """`784` -> (784,) and `3x32x32` -> (3, 32, 32); UserError for anything else."""
    if re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8}x[1-9][0-9]{0,8})?", text, re.ASCII):
        shape = tuple(int(part) for part in text.split("x"))
        if len(shape) == 1 or shape[0] in (1, 3):
            return shape
    raise UserError(
        "this is not the shape of a sample",
        where="input-size",
        got=repr(text),
        allowed="a length such as 784, or channels x height x width such as 3x32x32 (channels 1 or 3)",
    )


def check_total_size(shape: tuple[int, ...], num_samples: int, *, at_most_bytes: int = MAX_BYTES) -> None:
    """Refuse a generated set that takes too much memory."""
    sample_bytes = math.prod(shape) * (1 if len(shape) == 3 else 4)
    if sample_bytes * num_samples > at_most_bytes:
        raise UserError(
            "the generated data set would be too large",
            where="input-size, num-samples",
            got=f"{num_samples} samples of {sample_bytes} bytes each",
            allowed=f"at most {at_most_bytes // 2**20} MiB in total",
            hint=f"--num-samples {max(1, at_most_bytes // sample_bytes)}, or smaller samples",
        )
