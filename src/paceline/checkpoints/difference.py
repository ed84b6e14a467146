"""Where two checkpoints first differ, tensor by tensor, whatever strategy wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.format import STEP_PREFIX, DamagedCheckpoint, FileSeal, read_manifest, step_folders
from paceline.checkpoints.payload import PayloadReader
from paceline.checkpoints.store import Checkpoint, open_checkpoint
from paceline.parallel.parts import bits

# Ranks' own statistics are left out: another number of ranks has others, and the model holds their mean.
_KINDS = ("model", "optimizer", "ema")


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor, in the order of names, that is not the same to the last bit."""

    kind: str
    name: str
    largest: float | None  # None where values cannot be compared one by one; `text` says why
    index: tuple[int, ...] | None
    text: str

    def __str__(self) -> str:
        return f"{self.kind} tensor {self.name}: {self.text}"


@dataclass(frozen=True)
class CheckpointComparison:
    step: int
    tensors_compared: int
    difference: TensorDifference | None


def compare_newest(first: Path, second: Path) -> CheckpointComparison | None:
    """Compare two runs' checkpoints of the newest step both have; None if there is no such step."""
    mine, other = _by_step(first), _by_step(second)
    common = mine.keys() & other.keys()
    if not common:
        return None
    step = max(common)
    return _compare(step, open_checkpoint(mine[step]), open_checkpoint(other[step]))


def compare_step(first: Path, second: Path, step: int) -> CheckpointComparison:
    """Compare two runs' checkpoints of a step that both have."""
    mine, other = _by_step(first)[step], _by_step(second)[step]
    seals = [_tensor_seals(path) for path in (mine, other)]
    if seals[0] and seals[0] == seals[1]:
        return CheckpointComparison(step, 0, None)  # the same bytes: no tensor has to be opened
    return _compare(step, open_checkpoint(mine), open_checkpoint(other))


def _tensor_seals(path: Path) -> dict[str, FileSeal]:
    """Size and checksum of the files with tensors; empty if the manifest cannot be read."""
    try:
        files = read_manifest(path).files
    except DamagedCheckpoint:
        return {}
    return {name: seal for name, seal in files.items() if name.startswith(_KINDS)}


def _by_step(run: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix(STEP_PREFIX)): path for path in step_folders(run / "checkpoints")}


def _compare(step: int, first: Checkpoint, second: Checkpoint) -> CheckpointComparison:
    count = 0
    for kind in _KINDS:
        mine, other = (PayloadReader(item.path, item.files_of(kind)) for item in (first, second))
        for name in sorted(mine.shapes.keys() | other.shapes.keys()):
            count += 1
            difference = _compare_tensor(kind, name, mine, other)
            if difference is not None:
                return CheckpointComparison(step, count, difference)
    return CheckpointComparison(step, count, None)


def _compare_tensor(kind: str, name: str, mine: PayloadReader, other: PayloadReader) -> TensorDifference | None:
    if name not in mine.shapes or name not in other.shapes:
        which = "first" if name in mine.shapes else "second"
        return TensorDifference(kind, name, None, None, f"only the {which} run has it")
    if mine.shapes[name] != other.shapes[name]:
        text = f"shape {list(mine.shapes[name])} and {list(other.shapes[name])}"
        return TensorDifference(kind, name, None, None, text)
    a, b = mine.read(name), other.read(name)
    if a.dtype != b.dtype:
        text = f"{a.dtype} and {b.dtype}".replace("torch.", "")
        return TensorDifference(kind, name, None, None, text)
    if torch.equal(_bytes(a), _bytes(b)):
        return None
    try:
        largest, index = _largest_difference(a, b)
    except (RuntimeError, TypeError):  # torch does not calculate with this type
        return TensorDifference(kind, name, None, None, f"other bits of {a.dtype}".replace("torch.", ""))
    text = f"largest absolute difference {largest:.6g} at {list(index)}"
    return TensorDifference(kind, name, largest, index, text)


def _bytes(tensor: Tensor) -> Tensor:
    """Bits, not values: 0.0 equals -0.0 and NaN does not equal itself."""
    return bits(tensor).contiguous().view(-1).view(torch.uint8)


def _other_bits(a: Tensor, b: Tensor) -> Tensor:
    """For each element, whether any of its bits differs."""
    return (_bytes(a) != _bytes(b)).view(-1, a.element_size()).any(1)


def _largest_difference(a: Tensor, b: Tensor) -> tuple[float, tuple[int, ...]]:
    precise = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(precise) - b.to(precise)).abs()
    # A NaN or an infinity differs from a number by infinity; two equal ones do not differ.
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, gap.nan_to_num(nan=float("inf")))
    # Bits may differ where values do not: then the first such element is reported.
    position = int((gap if gap.any() else _other_bits(a, b)).reshape(-1).to(torch.float64).argmax())
    index = torch.unravel_index(torch.tensor(position), a.shape)
    return float(gap.reshape(-1)[position]), tuple(int(number) for number in index)
