"""Random draws without a generator: a hash of numbers, computed for a whole batch at once.

A draw depends on its keys alone - seed, epoch, sample, draw number - never on who asks, in which
order or how often. The mixer is the 64-bit finaliser of the SplitMix family; all arithmetic is exact
int64 wrap-around, so CPUs and GPUs agree to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_UNUSED = 33  # the lower bits of a draw
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw_bits(keys: Tensor, *context: int) -> Tensor:
    """64 random bits for each key (int64), in a context of plain numbers such as (seed, epoch)."""
    return draw_bits_from(keys, start_of(*context))


def start_of(*context: int) -> int:
    """A context as one number (int64)."""
    start = 0
    for number in context:
        start = _mix_int(start ^ _mix_int(number + _GOLDEN))
    return _signed(start)


def draw_bits_from(keys: Tensor, starts: int | Tensor) -> Tensor:
    """64 random bits for each key and start; shapes broadcast."""
    return _mix(_mix(keys + _signed(_GOLDEN)) ^ starts)


def draw_sequence(starts: Tensor, numbers: Tensor) -> Tensor:
    """64 random bits for each number of the sequence that begins at each start; shapes broadcast.

    Starts are random already, which saves the hash of the numbers: this is the generator SplitMix64.
    """
    return _mix(starts + (numbers + 1) * _signed(_GOLDEN))


def below(limit: int, bits: Tensor) -> Tensor:
    """A whole number in [0, limit) for each 64 random bits."""
    return _shift(bits, _UNUSED) % limit


def turn_even(number: int) -> int:
    """Bits that, by exclusive or, turn what `below` makes of others from even to odd if this number is odd."""
    return (number % 2) << _UNUSED


def draw_below(limit: int, keys: Tensor, *context: int) -> Tensor:
    """A whole number in [0, limit) for each key."""
    return below(limit, draw_bits(keys, *context))


def draw_permutation(size: int, *context: int, device: str | torch.device = "cpu") -> Tensor:
    """The numbers 0..size-1 in random order, the same on every device."""
    return torch.argsort(draw_bits(torch.arange(size, device=device), *context), stable=True)


def _mix(bits: Tensor) -> Tensor:
    # In place where it can be: the steps of small models draw many small tensors.
    bits = _shift(bits, 30).bitwise_xor_(bits).mul_(_signed(_MULTIPLIERS[0]))
    bits = _shift(bits, 27).bitwise_xor_(bits).mul_(_signed(_MULTIPLIERS[1]))
    return _shift(bits, 31).bitwise_xor_(bits)


def _mix_int(bits: int) -> int:
    """The same on a plain number, so that the context costs no tensor operations."""
    bits %= _WORD
    bits = (bits ^ bits >> 30) * _MULTIPLIERS[0] % _WORD
    bits = (bits ^ bits >> 27) * _MULTIPLIERS[1] % _WORD
    return bits ^ bits >> 31


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
