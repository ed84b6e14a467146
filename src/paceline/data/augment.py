"""Turns raw samples into model inputs, one batch at a time, on the batch's device.

Every random choice is drawn from (seed, epoch, sample id, draw number). A sample therefore gets the same
pixels in an epoch on any rank, in any worker and in any batch. Nothing here reads a value back from the device, so
the work can be recorded as a CUDA graph (runtime/recorded.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data import picture_ops as ops
from paceline.data.crops import Crops, erase_boxes, random_boxes
from paceline.data.dataset import DatasetInfo
from paceline.data.draws import below, draw_bits_from, draw_sequence, start_of, turn_even, unit
from paceline.data.mixing import NOT_MIXED, Mixing
from paceline.data.policies import blur_radius, rand_augment, three_augment, trivial_augment
from paceline.errors import UserError
from paceline.settings.resolution import RESIZED, Schedule, evaluation_size, training_sizes
from paceline.settings.schema import DataConfig
from paceline.settings.tasks import SINGLE_LABEL

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SHIFTED = {"light": 8, "gentle": 16, "lively": 8}  # crops move by at most 1/8 or 1/16 of a side
MIRRORED = ("gentle", "lively")  # mirror the borders, and flip each sample in every other epoch
# Draw numbers. Each is 64 random bits per sample; a stage that needs more derives them from its bits.
_ROW, _COLUMN, _FLIP, _CUT_ROW, _CUT_COLUMN, _BOX, _VERTICAL, _POLICY, _COLOUR, _ERASE, _MIX = range(10, 21)


@dataclass(frozen=True)
class Extras:
    """Augmentations beside crop and flip. The defaults switch all of them off."""

    crop_scale: float = 0.08  # the smallest share of the area that a random resized crop takes
    crop_ratio: float = 4 / 3  # the largest ratio of its sides
    interpolation: str = "bilinear"
    vertical_flip: bool = False
    policy: str = "none"
    policy_ops: int = 2
    policy_magnitude: float = 9.0
    policy_std: float = 0.0
    color_jitter: float = 0.0
    hue_jitter: float = 0.0
    grayscale: float = 0.0  # these three: the share of the samples
    blur: float = 0.0
    solarize: float = 0.0
    erase: float = 0.0
    mixing: Mixing | None = None
    mix_epochs: int = 0  # mix in the first epochs only; 0: in all

    @property
    def changes_colours(self) -> bool:
        return bool(self.color_jitter or self.hue_jitter or self.grayscale or self.blur or self.solarize)


@dataclass(frozen=True)
class Pipeline:
    """How one data set's samples are turned into inputs, for training and for evaluation."""

    kind: str  # "none", or one of SHIFTED or RESIZED
    seed: int
    raw_shape: tuple[int, ...]
    image_size: int  # of inputs in evaluation; `in_epoch` gives the pipeline with the size of an epoch
    flip: bool
    cutout: int
    mean: tuple[float, ...]  # empty for floats, which are not normalised
    std: tuple[float, ...]
    extras: Extras = Extras()
    training_sizes: Schedule = ()  # empty: as in evaluation
    repeats: int = 1  # of each sample in a global batch
    crops_pictures: bool = False  # resized crops and flips are of whole pictures, while they are decoded

    def in_epoch(self, epoch: int) -> Pipeline:
        """The same pipeline with the input size of this epoch of training."""
        sides = [side for start, side in self.training_sizes if start <= epoch]
        return replace(self, image_size=sides[-1]) if sides and sides[-1] != self.image_size else self

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one model input."""
        if self.kind in RESIZED:
            return (self.raw_shape[0], self.image_size, self.image_size)
        return self.raw_shape

    @property
    def most_values(self) -> int:
        """The largest number of values that a sample has on its way to an input of an evaluation."""
        if self.kind not in RESIZED:
            return math.prod(self.raw_shape)
        return max(math.prod(self.raw_shape), self.raw_shape[0] * math.prod(self._resized(*self.raw_shape[1:])))

    @cached_property
    def _draws(self) -> tuple[int, ...]:
        """The draws that this pipeline needs, ascending."""
        extras = self.extras
        needed = {
            _ROW: True,
            _COLUMN: True,
            _FLIP: True,
            _CUT_ROW: self.cutout > 0,
            _CUT_COLUMN: self.cutout > 0,
            _BOX: self.kind == "resized-crop",
            _VERTICAL: extras.vertical_flip,
            _POLICY: extras.policy != "none",
            _COLOUR: extras.changes_colours,
            _ERASE: extras.erase > 0,
            _MIX: extras.mixing is not None,
        }
        return tuple(number for number, is_needed in needed.items() if is_needed)

    @property
    def resized_side(self) -> int:
        """Evaluation crops 224 out of 256, and other sizes in the same proportion."""
        return round(self.image_size * 256 / 224)

    def for_training(self, samples: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """Augmented, normalised float inputs; ids are the samples' numbers in the data set."""
        if samples.dim() != 4:
            return samples
        drawn = self.draw(ids.to(samples.device), self.keys_of(epoch).to(samples.device))
        return self.in_epoch(epoch).augment(samples, drawn)

    def keys_of(self, epoch: int) -> Tensor:
        """The keys of an epoch's choices: one number per draw, whether samples are mixed, and what reverses flips."""
        alternates = self.kind in MIRRORED  # the flip draw is then the same in every epoch; odd epochs reverse it
        starts = [start_of(draw, self.seed, 0 if draw == _FLIP and alternates else epoch) for draw in self._draws]
        is_mixed = not self.extras.mix_epochs or epoch < self.extras.mix_epochs
        return torch.tensor([*starts, is_mixed, turn_even(epoch) if alternates else 0])

    def draw(self, ids: Tensor, keys: Tensor) -> Tensor:
        """Random bits for these samples, one layer per choice. `ids` may have any shape, for example a whole epoch.

        With repeats, `ids` are draw keys (`order.py`).
        """
        if len(self.raw_shape) != 3:
            return ids
        bits = draw_bits_from(ids, keys[:-2].view(-1, *[1] * ids.dim()))
        bits[self._draws.index(_FLIP)] ^= keys[-1]
        if self.extras.mixing is not None:
            mix = bits[self._draws.index(_MIX)]
            bits[self._draws.index(_MIX)] = torch.where(keys[-2].bool(), mix, torch.full_like(mix, NOT_MIXED))
        return bits

    def crops(self, keys: Tensor, epoch: int) -> Crops | None:
        """Crops and flips that the data set does while it decodes these samples; None if `augment` does them."""
        if not self.crops_pictures:
            return None
        box, flip = (draw_bits_from(keys.cpu(), start_of(draw, self.seed, epoch)) for draw in (_BOX, _FLIP))
        flips = below(2, flip).bool() if self.flip else torch.zeros(len(keys), dtype=torch.bool)
        extras, side = self.extras, self.in_epoch(epoch).image_size
        return Crops(box, flips, side, extras.crop_scale, extras.crop_ratio, extras.interpolation)

    def augment(self, samples: Tensor, drawn: Tensor) -> Tensor:
        """Like `for_training`, with bits that are drawn already. All tensors are on one device."""
        if samples.dim() != 4:
            return samples
        bits = dict(zip(self._draws, drawn, strict=True))
        samples = self._crop(samples, bits)
        if self.flip and self.kind != "none" and not self.crops_pictures:
            samples = ops.flip(samples, below(2, bits[_FLIP]).bool(), -1)
        if self.extras.vertical_flip:
            samples = ops.flip(samples, below(2, bits[_VERTICAL]).bool(), -2)
        samples = self._change_colours(samples, bits)
        inputs = self._normalise(samples)
        if self.cutout:
            inputs = self._cut_out(inputs, bits)
        return self._erase(inputs, bits[_ERASE]) if self.extras.erase else inputs

    def mix(self, inputs: Tensor, labels: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Mixup and CutMix with soft targets, if this pipeline has them; otherwise what is given."""
        if self.extras.mixing is None or inputs.dim() != 4:
            return inputs, labels
        return self.extras.mixing.mix(inputs, labels, drawn[self._draws.index(_MIX)])

    def empty_targets(self, count: int, info: DatasetInfo, device: torch.device) -> Tensor:
        """Targets of the shape and type that a training step gets."""
        if self.extras.mixing is None and info.task == SINGLE_LABEL:
            return torch.zeros(count, dtype=torch.int64, device=device)
        return torch.zeros(count, info.num_classes, device=device)

    def describe(self) -> str:
        """The augmentation of training samples in one line."""
        if len(self.raw_shape) != 3:
            return "none: vectors reach the model as they are"
        extras, parts = self.extras, [self.kind]
        if self.kind == "resized-crop":
            whole = "picture" if self.crops_pictures else "area"
            parts[0] += f" of {extras.crop_scale:.0%} to 100% of the {whole}"
        if self.training_sizes not in ((), ((0, self.image_size),)):
            sides = [f"{side} px" + (f" from epoch {start}" if start else "") for start, side in self.training_sizes]
            parts.append(f"{', '.join(sides)}, {self.image_size} px in evaluation")
        if self.flip and self.kind != "none":
            parts.append("flip")
        if extras.policy == "randaugment":
            deviation = f" (deviation {extras.policy_std:g})" if extras.policy_std else ""
            parts.append(f"{extras.policy_ops} operations of strength {extras.policy_magnitude:g}{deviation}")
        elif extras.policy != "none":
            parts.append({"trivial": "TrivialAugment", "three": "three-augment"}[extras.policy])
        values = {
            "vertical flip": extras.vertical_flip,
            "colour jitter": extras.color_jitter,
            "hue jitter": extras.hue_jitter,
            "grey": extras.grayscale,
            "blur": extras.blur,
            "solarize": extras.solarize,
            "cutout": self.cutout,
            "erase": extras.erase,
        }
        parts += [name if value is True else f"{name} {value:g}" for name, value in values.items() if value]
        if self.repeats > 1:
            parts.append(f"{self.repeats} repeats")
        if extras.mixing is not None:
            count = f"{extras.mix_epochs} epoch{'s' if extras.mix_epochs > 1 else ''}"
            until = f" for {count}" if extras.mix_epochs else ""
            methods = {"mixup": extras.mixing.mixup_alpha, "cutmix": extras.mixing.cutmix_alpha}
            parts += [f"{name} {alpha:g}{until}" for name, alpha in methods.items() if alpha]
        if not self.mean:
            parts.append("floats are not normalised")
        return ", ".join(parts)

    def _crop(self, samples: Tensor, bits: dict[int, Tensor]) -> Tensor:
        if self.kind in SHIFTED:
            rows, columns = (size // SHIFTED[self.kind] for size in self.raw_shape[1:])
            if self.kind in MIRRORED:
                bordered = ops.mirror_borders(samples, rows, columns)
            else:
                bordered = F.pad(samples, [columns, columns, rows, rows])
            return _crop(bordered, self.raw_shape[1:], bits[_ROW], bits[_COLUMN])
        if self.kind == "imagenet":
            return _crop(self._resize(samples), (self.image_size,) * 2, bits[_ROW], bits[_COLUMN])
        if self.kind == "resized-crop" and not self.crops_pictures:
            extras, (height, width) = self.extras, samples.shape[2:]
            boxes = random_boxes(bits[_BOX], height, width, extras.crop_scale, extras.crop_ratio)
            return ops.resize_boxes(samples, boxes, (self.image_size,) * 2, extras.interpolation)
        return samples

    def _change_colours(self, samples: Tensor, bits: dict[int, Tensor]) -> Tensor:
        extras = self.extras
        if extras.policy == "none" and not extras.changes_colours:
            return samples
        samples = samples if samples.dtype == torch.uint8 else ops.to_bytes(samples)
        if extras.policy == "randaugment":
            samples = rand_augment(
                samples, bits[_POLICY], extras.policy_ops, extras.policy_magnitude, extras.policy_std
            )
        elif extras.policy == "trivial":
            samples = trivial_augment(samples, bits[_POLICY])
        elif extras.policy == "three":
            samples = three_augment(samples, bits[_POLICY])
        return self._jitter(samples, bits[_COLOUR]) if extras.changes_colours else samples

    def _jitter(self, samples: Tensor, bits: Tensor) -> Tensor:
        """Brightness, contrast, saturation and hue in this order, then grey, solarized and blurred samples."""
        extras, channels = self.extras, samples.shape[1]
        draws = unit(draw_sequence(bits[None], torch.arange(8, device=bits.device)[:, None])).unbind(0)
        factors = [max(0.0, 1 - extras.color_jitter) + draw * _span(extras.color_jitter) for draw in draws[:3]]
        if extras.color_jitter:
            samples = ops.apply_tables(samples, ops.brightness_tables(factors[0]).expand(-1, channels, -1))
            samples = ops.apply_tables(samples, ops.contrast_tables(factors[1], samples).expand(-1, channels, -1))
            samples = ops.saturate(samples, factors[2])
        if extras.hue_jitter:
            samples = ops.rotate_hue(samples, (2 * draws[3] - 1) * extras.hue_jitter)
        if extras.grayscale:
            samples = ops.choose(draws[4] < extras.grayscale, ops.gray(samples).expand_as(samples), samples)
        if extras.solarize:
            tables = ops.solarize_tables(torch.full_like(draws[5], 128.0)).expand(-1, channels, -1)
            samples = ops.choose(draws[5] < extras.solarize, ops.apply_tables(samples, tables), samples)
        if extras.blur:
            blurred = ops.blur(samples, 0.1 + 1.9 * draws[7], blur_radius(samples))
            samples = ops.choose(draws[6] < extras.blur, blurred, samples)
        return samples

    def _erase(self, inputs: Tensor, bits: Tensor) -> Tensor:
        """Set a rectangle of some samples to the mean colour."""
        inside = erase_boxes(bits, inputs.shape[2], inputs.shape[3], self.extras.erase)
        return inputs.masked_fill_(inside[:, None], 0.0)

    def for_evaluation(self, samples: Tensor) -> Tensor:
        """Normalised inputs without any randomness; resizing pipelines take the centre."""
        if samples.dim() != 4:
            return samples
        if self.kind in RESIZED:
            samples = self._resize(samples)
            top, left = ((size - self.image_size) // 2 for size in samples.shape[2:])
            samples = samples[:, :, top : top + self.image_size, left : left + self.image_size]
        return self._normalise(samples)

    def _resize(self, samples: Tensor) -> Tensor:
        """Bring the shorter side to `resized_side`."""
        height, width = samples.shape[2:]
        scale = self.resized_side / min(height, width)
        if scale == 1.0:
            return samples
        size = self._resized(height, width)
        return F.interpolate(samples.float(), size, mode="bilinear", align_corners=False, antialias=scale < 1.0)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        scale = self.resized_side / min(height, width)
        return round(height * scale), round(width * scale)

    def _normalise(self, samples: Tensor) -> Tensor:
        if self.mean:
            return ops.normalise(samples, self.mean, self.std)
        inputs = samples.contiguous(memory_format=torch.channels_last).float()
        # Cutout and erasing write in place. They must not change samples that a data set returned as a view.
        return inputs.clone() if inputs is samples and (self.cutout or self.extras.erase) else inputs

    def _cut_out(self, inputs: Tensor, bits: dict[int, Tensor]) -> Tensor:
        """Set a square to the mean colour, which is zero after normalisation."""
        inside = []
        for size, number in zip(inputs.shape[2:], (_CUT_ROW, _CUT_COLUMN), strict=True):
            start = below(size, bits[number])[:, None] - self.cutout // 2
            axis = torch.arange(size, device=inputs.device)[None]
            inside.append((axis >= start) & (axis < start + self.cutout))
        square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return inputs.masked_fill_(square, 0.0)


def _crop(samples: Tensor, size: tuple[int, ...], row_bits: Tensor, column_bits: Tensor) -> Tensor:
    height, width = size
    rows = below(samples.shape[2] - height + 1, row_bits)
    columns = below(samples.shape[3] - width + 1, column_bits)
    # A view of every window of every sample; indexing copies only the chosen ones.
    windows = samples.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(samples), device=samples.device), :, rows, columns]


def _span(jitter: float) -> float:
    """The length of the interval from max(0, 1 - jitter) to 1 + jitter."""
    return 1 + jitter - max(0.0, 1 - jitter)


def build_pipeline(config: DataConfig, info: DatasetInfo, seed: int) -> Pipeline:
    """The pipeline a config asks for; vectors pass through unchanged."""
    kind = config.augment
    extras = _build_extras(config, info)
    if not info.is_image and (kind in RESIZED or extras != Extras()):
        what = f"the {kind} pipeline" if kind in RESIZED else "this augmentation"
        raise UserError(f"{what} needs images", got=f"{info.name} has vectors", hint="--augment none")
    if info.is_image:
        _require_colours(kind, extras, info)
    is_imagenet = kind in RESIZED and info.sample_shape[0] == 3 and not info.is_float
    return Pipeline(
        kind=kind,
        seed=seed,
        raw_shape=info.sample_shape,
        image_size=evaluation_size(config),
        flip=config.flip,
        cutout=config.cutout,
        mean=IMAGENET_MEAN if is_imagenet else info.mean,
        std=IMAGENET_STD if is_imagenet else info.std,
        extras=extras,
        training_sizes=training_sizes(config) if kind in RESIZED else (),
        repeats=config.repeat_augment,
        crops_pictures=config.crop_from == "picture",
    )


def _require_colours(kind: str, extras: Extras, info: DatasetInfo) -> None:
    """Some augmentations compute with bytes of 1 or 3 colours."""
    needs_bytes = kind if kind in RESIZED else extras.policy if extras.policy != "none" else ""
    if not needs_bytes and extras.changes_colours:
        needs_bytes = "a change of colours"
    channels = info.sample_shape[0]
    if needs_bytes and info.is_float:
        raise UserError(
            f"{needs_bytes} needs uint8 images", got="float32 images", hint="uint8 arrays, or --augment light or none"
        )
    if (extras.policy != "none" or extras.changes_colours) and channels not in (1, 3):
        raise UserError(
            "policies and changes of colours need images of 1 or 3 channels",
            got=f"{channels} channels",
            hint="leave them out",
        )


def _build_extras(config: DataConfig, info: DatasetInfo) -> Extras:
    mixing = None
    if config.mixup_alpha or config.cutmix_alpha:
        mixing = Mixing(config.mixup_alpha, config.cutmix_alpha, config.cutmix_share, info.num_classes)
    same = {field.name for field in fields(Extras)} - {"mixing"}
    return Extras(mixing=mixing, **{name: getattr(config, name) for name in same})
