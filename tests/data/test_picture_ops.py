"""Picture operations: each equals torchvision's with the same parameters, and no sample depends on its batch."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.torchvision_shim import import_torchvision
from paceline.data import picture_ops as ops
from paceline.data.draws import draw_bits
from paceline.data.policies import (
    AUTO_CONTRAST,
    BRIGHTNESS,
    COLOR,
    CONTRAST,
    EQUALIZE,
    IDENTITY,
    OPERATIONS,
    POSTERIZE,
    RAND_AUGMENT,
    ROTATE,
    SHARPNESS,
    SHEAR_X,
    SHEAR_Y,
    SOLARIZE,
    TRANSLATE_X,
    TRANSLATE_Y,
    TRIVIAL_AUGMENT,
    apply_operation,
    rand_augment,
    three_augment,
    trivial_augment,
)

NAMES = {
    IDENTITY: "Identity",
    SHEAR_X: "ShearX",
    SHEAR_Y: "ShearY",
    TRANSLATE_X: "TranslateX",
    TRANSLATE_Y: "TranslateY",
    ROTATE: "Rotate",
    BRIGHTNESS: "Brightness",
    CONTRAST: "Contrast",
    POSTERIZE: "Posterize",
    SOLARIZE: "Solarize",
    AUTO_CONTRAST: "AutoContrast",
    EQUALIZE: "Equalize",
    COLOR: "Color",
    SHARPNESS: "Sharpness",
}
GEOMETRIC = {SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE}


def pictures(count: int = 6, height: int = 33, width: int = 40, channels: int = 3) -> Tensor:
    """Smooth pictures with some noise: neighbours differ little, as in photos."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.randint(0, 256, (count, channels, 5, 6), generator=generator).float()
    smooth = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
    return (smooth + 8 * torch.randn(smooth.shape, generator=generator)).clamp(0, 255).to(torch.uint8)


def import_v2() -> Any:
    import_torchvision()
    return importlib.import_module("torchvision.transforms.v2")


def difference(mine: Tensor, theirs: Tensor) -> tuple[int, float]:
    """The largest difference of two values, and the share of values that differ at all."""
    gap = (mine.int() - theirs.int()).abs()
    return int(gap.max()), float((gap > 0).float().mean())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_box_is_resized_like_torchs_antialiased_interpolation(interpolation: str) -> None:
    samples = pictures(count=7)
    boxes = torch.tensor(
        [[0, 0, 33, 40], [3, 5, 20, 30], [10, 10, 8, 8], [0, 0, 1, 1], [5, 0, 28, 17], [2, 3, 5, 37], [1, 1, 31, 38]]
    )
    resized = ops.resize_boxes(samples, boxes, (24, 24), interpolation)
    for number, (top, left, height, width) in enumerate(boxes.tolist()):
        part = samples[number : number + 1, :, top : top + height, left : left + width].float()
        theirs = F.interpolate(part, (24, 24), mode=interpolation, align_corners=False, antialias=True)
        # A value exactly between two bytes may be rounded either way: torch adds in another order.
        largest, share = difference(resized[number : number + 1], theirs.round().clamp(0, 255))
        assert largest <= 1
        assert share < 0.005


@pytest.mark.parametrize("space", [RAND_AUGMENT, TRIVIAL_AUGMENT], ids=["randaugment", "trivial"])
@pytest.mark.parametrize("operation", NAMES, ids=NAMES.values())
def test_an_operation_equals_torchvisions(operation: int, space: Any) -> None:
    v2 = import_v2()
    policy = v2.RandAugment() if space is RAND_AUGMENT else v2.TrivialAugmentWide()
    samples = pictures()
    magnitudes_of, is_signed = policy._AUGMENTATION_SPACE[NAMES[operation]]
    magnitudes = magnitudes_of(31, 33, 40)
    for strength in (0, 3, 9, 17, 30):
        for is_negative in (False, True) if is_signed else (False,):
            magnitude = float(magnitudes[strength]) if magnitudes is not None else 0.0
            theirs = policy._apply_image_or_video_transform(
                samples,
                NAMES[operation],
                -magnitude if is_negative else magnitude,
                interpolation=v2.InterpolationMode.NEAREST,
                fill={torch.Tensor: None},
            )
            rows = len(samples)
            mine = apply_operation(
                samples,
                torch.full((rows,), operation),
                torch.full((rows,), float(strength)),
                torch.full((rows,), is_negative),
                space,
            )
            largest, share = difference(mine, theirs)
            if operation in GEOMETRIC:
                # Nearest pixels: between two pixels, float32 and float64 may choose differently.
                assert share < 0.02, (strength, is_negative)
            else:
                # One level: both truncate, and a value at the edge of two levels has other last bits there.
                assert largest <= 1, (strength, is_negative)
                assert share < 0.1, (strength, is_negative)


def test_hue_blur_and_gray_equal_torchvisions() -> None:
    functional = import_v2().functional
    samples = pictures()
    for turn in (-0.5, -0.13, 0.0, 0.2, 0.5):
        mine = ops.rotate_hue(samples, torch.full((len(samples),), turn))
        largest, share = difference(mine, functional.adjust_hue(samples, turn))
        assert largest <= 1  # theirs truncates, ours rounds
    for sigma in (0.1, 0.8, 2.0):
        mine = ops.blur(samples, torch.full((len(samples),), sigma), 2)
        largest, share = difference(mine, functional.gaussian_blur(samples, [5, 5], [sigma, sigma]))
        assert largest <= 1
        assert share < 0.005
    assert torch.equal(ops.gray(samples), functional.rgb_to_grayscale(samples, 1))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_sample_does_not_depend_on_its_batch(channels: int) -> None:
    """The same bits alone, in a part of the batch, and in the complete batch."""
    samples = pictures(count=40, channels=channels)
    bits = draw_bits(torch.arange(40), 3)
    policies = [
        lambda some, drawn: rand_augment(some, drawn, 2, 9, 0.5),
        trivial_augment,
        three_augment,
    ]
    for policy in policies:
        whole = policy(samples, bits)
        assert whole.shape == samples.shape
        assert not torch.equal(whole, samples)
        for part in (slice(0, 1), slice(7, 13), slice(13, 40)):
            assert torch.equal(policy(samples[part], bits[part]), whole[part])


def test_every_operation_is_drawn_and_choosing_on_the_device_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes every stage for every sample and then chooses; the result is the same."""
    samples = pictures(count=300, height=12, width=12)
    operation = torch.arange(300) % OPERATIONS
    strength, is_negative = torch.arange(300).double() % 31, torch.arange(300) % 2 == 0
    plain = apply_operation(samples, operation, strength, is_negative, RAND_AUGMENT)

    def choose_after(is_chosen: Tensor, values: Tensor, change: Any, *parameters: Any) -> Tensor:
        return ops.choose(is_chosen, change(values, *parameters), values)

    monkeypatch.setattr("paceline.data.policies._where", choose_after)
    assert torch.equal(apply_operation(samples, operation, strength, is_negative, RAND_AUGMENT), plain)


def test_a_rotation_by_zero_changes_nothing() -> None:
    samples = pictures()
    identity = torch.eye(2, 3).expand(len(samples), 2, 3)
    assert torch.equal(ops.affine(samples, identity), samples)
    quarter = math.pi / 2
    turned = torch.tensor([[math.cos(quarter), -math.sin(quarter), 0], [math.sin(quarter), math.cos(quarter), 0]])
    square = pictures(height=21, width=21)
    assert torch.equal(ops.affine(square, turned.expand(len(square), 2, 3)), torch.rot90(square, 1, (2, 3)))
