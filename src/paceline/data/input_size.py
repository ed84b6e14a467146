"""The sizes of data sets that are made here: the shape of a sample, the number of test samples, the limits of memory.

Imports no torch, so a wrong size is found before anything starts.
"""

from __future__ import annotations

import math
import re

from paceline.errors import UserError
from paceline.settings.schema import DataConfig

# Of all samples together: these data sets stay in memory, and are for quick tests.
_MOST_BYTES = {"synthetic": 2**28, "shapes": 2**32}
SHAPES_SAMPLE = (3, 32, 32)
CENTRE_SIDE = 4  # an image is made from a grid of this side


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


def count_test_samples(num_samples: int) -> int:
    """Test samples that are made besides `num_samples`."""
    return max(1000, num_samples // 10)


def check_made_size(config: DataConfig) -> None:
    """Refuse a shapes or synthetic set that takes too much memory."""
    is_synthetic = config.dataset == "synthetic"
    shape = parse_input_size(config.input_size) if is_synthetic else SHAPES_SAMPLE
    sample_bytes = math.prod(shape) * (1 if len(shape) == 3 else 4)
    most_bytes = _MOST_BYTES[config.dataset]
    count = config.num_samples + count_test_samples(config.num_samples)
    if sample_bytes * count > most_bytes:
        fitting = most_bytes // sample_bytes
        most = min(fitting - 1000, fitting * 10 // 11)
        raise UserError(
            f"the {config.dataset} data set would be too large",
            where="input-size, num-samples" if is_synthetic else "num-samples",
            got=f"{count} samples of {sample_bytes} bytes each, {count - config.num_samples} of them for the test",
            allowed=f"at most {most_bytes // 2**20} MiB in total",
            hint=f"--num-samples {most}" if most > 0 else f"samples of at most {most_bytes // 1001} bytes",
        )
    if is_synthetic:
        _check_classes(shape, config.num_classes)


def _check_classes(shape: tuple[int, ...], num_classes: int) -> None:
    """Each class has a centre: the float64 values of a vector, or of a coarse image."""
    length = shape[0] * CENTRE_SIDE**2 if len(shape) == 3 else shape[0]
    most = _MOST_BYTES["synthetic"] // (length * 8)  # at least 125: check_made_size has limited the shape
    if num_classes > most:
        raise UserError(
            "the centres of the synthetic classes would be too large",
            where="num-classes, input-size",
            got=f"{num_classes} centres of {length} values each",
            allowed=f"at most {_MOST_BYTES['synthetic'] // 2**20} MiB in total",
            hint=f"--num-classes {most}, or a smaller --input-size",
        )
