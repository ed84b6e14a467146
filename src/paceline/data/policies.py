"""Augmentation policies: RandAugment, TrivialAugment and three-augment, for a whole batch at once.

Each sample has its own operations and magnitudes. All samples run the same four stages (move pixels, replace tones,
saturate, sharpen); for the stages that a sample did not draw, its parameters leave it as it is. So the work is the
same for every batch and can be recorded. On a CPU a stage is computed only for the samples that need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data import picture_ops as ops
from paceline.data.draws import draw_sequence, unit

BINS = 31  # magnitudes 0 to 30

IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = range(6)
BRIGHTNESS, CONTRAST, POSTERIZE, SOLARIZE, AUTO_CONTRAST, EQUALIZE = range(6, 12)
COLOR, SHARPNESS = 12, 13
OPERATIONS = 14
_MOVES = (SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE)
_TONES = (BRIGHTNESS, CONTRAST, POSTERIZE, SOLARIZE, AUTO_CONTRAST, EQUALIZE)


@dataclass(frozen=True)
class Space:
    """The largest effect of each operation, at magnitude 30."""

    shear: float
    translate_share: float  # of the side; used if translate_px is 0
    translate_px: float
    rotate_degrees: float
    factor: float  # brightness, contrast, colour and sharpness go from 1 - factor to 1 + factor
    posterize_bits: int  # how many of the 8 bits are dropped


RAND_AUGMENT = Space(0.3, 150 / 331, 0, 30.0, 0.9, 4)
TRIVIAL_AUGMENT = Space(0.99, 0, 32, 135.0, 0.99, 6)


def rand_augment(samples: Tensor, bits: Tensor, count: int, magnitude: float, deviation: float) -> Tensor:
    """RandAugment: `count` random operations per sample. `bits` are 64 random bits per sample.

    `deviation` draws the magnitude of each operation from a normal distribution around `magnitude`.
    """
    for number in range(count):
        operation, sign, noise = _draw(bits, 3 * number, 3)
        strength = torch.full_like(noise, magnitude)
        if deviation:
            strength = (strength + deviation * _normal(noise)).clamp(0, BINS - 1)
        samples = apply_operation(samples, _index(operation, OPERATIONS), strength, sign < 0.5, RAND_AUGMENT)
    return samples


def trivial_augment(samples: Tensor, bits: Tensor) -> Tensor:
    """TrivialAugment (wide): one random operation per sample, with a random magnitude."""
    operation, sign, strength = _draw(bits, 0, 3)
    return apply_operation(
        samples, _index(operation, OPERATIONS), _index(strength, BINS).double(), sign < 0.5, TRIVIAL_AUGMENT
    )


def three_augment(samples: Tensor, bits: Tensor) -> Tensor:
    """Three-augment (DeiT III): each sample is made grey, solarized or blurred."""
    kind, deviation = _draw(bits, 0, 2)
    kind = _index(kind, 3)
    changed = ops.gray(samples).expand_as(samples)
    threshold = torch.full_like(deviation, 128.0)
    solarized = ops.apply_tables(samples, ops.solarize_tables(threshold).expand(-1, samples.shape[1], -1))
    blurred = ops.blur(samples, 0.1 + 1.9 * deviation, blur_radius(samples))
    return ops.choose(kind == 1, solarized, ops.choose(kind == 2, blurred, changed))


def blur_radius(samples: Tensor) -> int:
    """The kernel covers about a tenth of the picture."""
    return max(1, min(samples.shape[2:]) // 20)


def apply_operation(samples: Tensor, operation: Tensor, strength: Tensor, is_negative: Tensor, space: Space) -> Tensor:
    """One operation per sample: `operation` is its number, `strength` from 0 to 30."""
    share = strength.double() / (BINS - 1)
    signed = torch.where(is_negative, -share, share)
    matrices = _matrices(operation, signed, space, samples.shape[2], samples.shape[3])
    samples = _where(_is_one_of(operation, _MOVES), samples, ops.affine, matrices)
    samples = _where(_is_one_of(operation, _TONES), samples, _apply_tones, operation, share, signed, space)
    factor = 1 + space.factor * signed
    samples = _where(operation == COLOR, samples, ops.saturate, factor)
    return _where(operation == SHARPNESS, samples, ops.sharpen, factor)


def _apply_tones(samples: Tensor, operation: Tensor, share: Tensor, signed: Tensor, space: Space) -> Tensor:
    tables = ops.ramp(samples.device).to(torch.uint8).expand(*samples.shape[:2], -1)
    factor = 1 + space.factor * signed
    choices: dict[int, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        BRIGHTNESS: (ops.brightness_tables, (factor,)),
        CONTRAST: (ops.contrast_tables, (factor, samples)),
        POSTERIZE: (ops.posterize_tables, (8 - torch.round(share * space.posterize_bits),)),
        SOLARIZE: (ops.solarize_tables, (255 * (1 - share),)),
        AUTO_CONTRAST: (ops.stretch_tables, (samples,)),
        EQUALIZE: (ops.equalize_tables, (samples,)),
    }
    for number, (make, parameters) in choices.items():
        tables = _fill_tables(tables, operation == number, make, parameters)
    return ops.apply_tables(samples, tables)


def _fill_tables(
    tables: Tensor, is_chosen: Tensor, make: Callable[..., Tensor], parameters: tuple[Tensor, ...]
) -> Tensor:
    """Make the tables of the chosen samples."""
    if tables.is_cuda:
        return torch.where(is_chosen[:, None, None], make(*parameters), tables)
    chosen = is_chosen.nonzero().flatten()
    if not len(chosen):
        return tables
    made = make(*(value[chosen] for value in parameters))
    return tables.index_copy(0, chosen, made.expand(-1, tables.shape[1], -1))


def _matrices(operation: Tensor, signed: Tensor, space: Space, height: int, width: int) -> Tensor:
    """The matrix of each sample's move, from output to input coordinates; the identity for all other operations."""
    zero, one = torch.zeros_like(signed), torch.ones_like(signed)

    def only(number: int, value: Tensor, otherwise: Tensor = zero) -> Tensor:
        return torch.where(operation == number, value, otherwise)

    angle = only(ROTATE, signed * math.radians(space.rotate_degrees))
    shear_x, shear_y = only(SHEAR_X, signed * space.shear), only(SHEAR_Y, signed * space.shear)
    reach_x, reach_y = (space.translate_px or space.translate_share * side for side in (width, height))
    # Moves are whole pixels, as elsewhere.
    right = only(TRANSLATE_X, torch.trunc(signed * reach_x))
    down = only(TRANSLATE_Y, torch.trunc(signed * reach_y))
    # Shearing keeps the upper or left edge in place; rotating keeps the centre.
    from_corner_x, from_corner_y = shear_x * (height / 2), shear_y * (width / 2)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    first = [only(ROTATE, cosine, one), only(ROTATE, -sine, shear_x), from_corner_x - right]
    second = [only(ROTATE, sine, shear_y), only(ROTATE, cosine, one), from_corner_y - down]
    return torch.stack([torch.stack(first, 1), torch.stack(second, 1)], 1)


def _where(is_chosen: Tensor, samples: Tensor, change: Callable[..., Tensor], *parameters: Tensor | Space) -> Tensor:
    """`change` applied to the chosen samples only."""
    if samples.is_cuda:  # which samples are chosen is known on the device only
        return ops.choose(is_chosen, change(samples, *parameters), samples)
    chosen = is_chosen.nonzero().flatten()
    if not len(chosen):
        return samples
    part = change(samples[chosen], *(value[chosen] if isinstance(value, Tensor) else value for value in parameters))
    return samples.index_copy(0, chosen, part)


def _is_one_of(operation: Tensor, numbers: tuple[int, ...]) -> Tensor:
    return (operation >= numbers[0]) & (operation <= numbers[-1])


def _draw(bits: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
    """So many uniform numbers in [0, 1) per sample, from its 64 random bits."""
    numbers = torch.arange(first, first + count, device=bits.device)
    return unit(draw_sequence(bits[None], numbers[:, None])).unbind(0)


def _index(uniform: Tensor, count: int) -> Tensor:
    return (uniform * count).long()


def _normal(uniform: Tensor) -> Tensor:
    normal: Tensor = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    return normal
