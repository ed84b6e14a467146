"""Random draws without a generator: a hash of numbers, computed for a whole batch at once.

A draw depends only on its keys (seed, epoch, sample, draw number), not on the caller, the order of calls or their
number. The mixer is the 64-bit finaliser of the SplitMix family. All arithmetic is exact int64 wrap-around, so CPUs
and GPUs give the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_UNUSED = 33  # `below` drops this many low bits of a draw
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN_WORD = np.uint64(_GOLDEN)
_MULTIPLIER_WORDS = tuple(map(np.uint64, _MULTIPLIERS))
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))

Words = npt.NDArray[np.uint64]


def draw_bits(keys: Tensor, *context: int) -> Tensor:
    """64 random bits for each key (int64), in a context of plain numbers such as (seed, epoch)."""
    return draw_bits_from(keys, start_of(*context))


def start_of(*context: int) -> int:
    """Hash a context into one number (int64)."""
    start = 0
    for number in context:
        start = _mix_int(start ^ _mix_int(number + _GOLDEN))
    return _signed(start)


def draw_bits_from(keys: Tensor, starts: int | Tensor) -> Tensor:
    """64 random bits for each key and start; shapes broadcast."""
    return _mix(_mix(keys + _signed(_GOLDEN)) ^ starts)


def draw_sequence(starts: Tensor, numbers: Tensor) -> Tensor:
    """64 random bits for each number of the sequence that begins at each start; shapes broadcast.

    Starts are random already, so the numbers are not hashed separately. This is the generator SplitMix64.
    """
    return _mix(starts + (numbers + 1) * _signed(_GOLDEN))


def later_start(starts: Tensor, count: int) -> Tensor:
    """The starts of the same sequences without their first `count` numbers."""
    return starts + _signed(count * _GOLDEN % _WORD)


def draw_sequence_on_host(starts: Tensor, first: int, count: int) -> npt.NDArray[np.int64]:
    """The same bits for `count` numbers from `first` on, a row per start, by numpy.

    For small tensors most of the time is spent per operation, and an operation of numpy takes a third of torch's.
    """
    numbers = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * _GOLDEN_WORD
    return _mix_array(starts.numpy().view(np.uint64)[:, None] + numbers).view(np.int64)


def below(limit: int, bits: Tensor) -> Tensor:
    """A whole number in [0, limit) for each 64 random bits."""
    return _shift(bits, _UNUSED) % limit


def unit(bits: Tensor) -> Tensor:
    """A uniform float64 in [0, 1) for each 64 random bits."""
    return _shift(bits, 11).double() * 2.0**-53


def turn_even(number: int) -> int:
    """Bits to XOR with a draw. For an odd number they change `below(2, draw)` from 0 to 1 and from 1 to 0."""
    return (number % 2) << _UNUSED


def draw_below(limit: int, keys: Tensor, *context: int) -> Tensor:
    """A whole number in [0, limit) for each key."""
    return below(limit, draw_bits(keys, *context))


def draw_permutation(size: int, *context: int, device: str | torch.device = "cpu") -> Tensor:
    """The numbers 0..size-1 in random order, the same on every device."""
    return torch.argsort(draw_bits(torch.arange(size, device=device), *context), stable=True)


def _mix(bits: Tensor) -> Tensor:
    # In place where possible: a step of a small model draws many small tensors.
    bits = _shift(bits, 30).bitwise_xor_(bits).mul_(_signed(_MULTIPLIERS[0]))
    bits = _shift(bits, 27).bitwise_xor_(bits).mul_(_signed(_MULTIPLIERS[1]))
    return _shift(bits, 31).bitwise_xor_(bits)


def _mix_array(bits: Words) -> Words:
    """Like `_mix`, for a numpy array, which it overwrites. Unsigned, so a shift is logical."""
    mixed = bits >> _SHIFTS[0]
    mixed ^= bits
    mixed *= _MULTIPLIER_WORDS[0]
    np.right_shift(mixed, _SHIFTS[1], out=bits)
    bits ^= mixed
    bits *= _MULTIPLIER_WORDS[1]
    np.right_shift(bits, _SHIFTS[2], out=mixed)
    mixed ^= bits
    return mixed


def _mix_int(bits: int) -> int:
    """Like `_mix`, for a Python int: hashing a context needs no tensor operations."""
    bits %= _WORD
    bits = (bits ^ bits >> 30) * _MULTIPLIERS[0] % _WORD
    bits = (bits ^ bits >> 27) * _MULTIPLIERS[1] % _WORD
    return bits ^ bits >> 31


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
