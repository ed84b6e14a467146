"""The sizes of model inputs: the schedule `0:128,10:160,16:192`, and the size of evaluation. Imports no torch."""

from __future__ import annotations

import itertools
import re

from paceline.errors import UserError
from paceline.settings.load import LoadedConfig
from paceline.settings.schema import DataConfig

RESIZED = ("imagenet", "resized-crop")  # pipelines that give square inputs of any size
ONE_SIZE = ("mlp", "cnn")  # models whose linear layers are built for one size
_SMALLEST, _LARGEST, _MOST_SIZES = 8, 2048, 32
_EXAMPLE = "0:128,10:160,16:192: from epoch 0 on 128 pixels, from epoch 10 on 160, from epoch 16 on 192"

Schedule = tuple[tuple[int, int], ...]  # (first epoch, side in pixels), ascending


def parse_schedule(text: str, where: str | None = None) -> Schedule:
    """Empty for an empty text. UserError for anything else that is not a schedule."""
    if not text:
        return ()
    parts = [re.fullmatch(r" *([0-9]{1,6}) *: *([0-9]{1,6}) *", part, re.ASCII) for part in text.split(",")]
    found = tuple((int(part[1]), int(part[2])) for part in parts if part)
    if len(found) < len(parts):
        raise _wrong("this is not a schedule of sizes", text, where)
    if found[0][0] != 0:
        raise _wrong(f"the schedule starts late: epochs 0 to {found[0][0] - 1} have no size", text, where)
    if any(after <= before for (before, _), (after, _) in itertools.pairwise(found)):
        raise _wrong("the epochs of a schedule must increase", text, where)
    if any(not _SMALLEST <= side <= _LARGEST for _, side in found) or len(found) > _MOST_SIZES:
        allowed = f"sizes from {_SMALLEST} to {_LARGEST} pixels, at most {_MOST_SIZES} of them"
        raise UserError("a size of the schedule is not possible", where=where, got=text, allowed=allowed)
    return found


def _wrong(what: str, text: str, where: str | None) -> UserError:
    return UserError(what, where=where or "resolution_schedule", got=repr(text), allowed=_EXAMPLE)


def training_sizes(config: DataConfig) -> Schedule:
    """The size of training inputs, from which epoch on."""
    return parse_schedule(config.resolution_schedule) or ((0, config.image_size),)


def evaluation_size(config: DataConfig) -> int:
    return config.test_size or config.image_size


def largest_size(config: DataConfig) -> int:
    """Pictures of a folder are stored so that inputs of this size can be cut out of them."""
    return max(evaluation_size(config), *(side for _, side in training_sizes(config)))


def check_resolution(loaded: LoadedConfig) -> None:
    """The rules between sizes and other settings."""
    data, epochs = loaded.config.data, loaded.config.train.epochs
    schedule = parse_schedule(data.resolution_schedule, loaded.where("resolution_schedule"))
    for name in ("resolution_schedule", "test_size"):
        if getattr(data, name) and data.augment not in RESIZED:
            raise UserError(
                f"{name} needs a pipeline that resizes",
                where=loaded.where(name),
                got=f"augment {data.augment}",
                allowed=" or ".join(RESIZED),
                hint="--augment resized-crop",
            )
    if data.crop_from == "picture" and data.augment != "resized-crop":
        raise UserError(
            "crop_from picture needs random resized crops",
            where=loaded.where("crop_from"),
            got=f"augment {data.augment}",
            allowed="resized-crop",
            hint="--augment resized-crop, or --crop-from square",
        )
    unused = [f"{start}:{side}" for start, side in schedule if start >= epochs]
    if unused:
        raise UserError(
            "the run ends before the schedule of sizes",
            where=loaded.where("resolution_schedule"),
            got=f"{', '.join(unused)} and --epochs {epochs}",
            allowed=f"epochs from 0 to {epochs - 1}",
            hint=f"--epochs {schedule[-1][0] + 1} or more, or leave {', '.join(unused)} out",
        )
    sizes = sorted({evaluation_size(data), *(side for _, side in training_sizes(data))})
    if len(sizes) > 1 and loaded.config.model.model_name in ONE_SIZE:
        raise UserError(
            f"the {loaded.config.model.model_name} takes inputs of one size",
            where=loaded.where("resolution_schedule" if schedule else "test_size"),
            got=", ".join(map(str, sizes)) + " pixels",
            allowed="models that pool before their last layer, such as resnet18, vgg11 and sprint",
            hint="--model-name resnet18, or one size",
        )
    smallest = min(side for _, side in training_sizes(data))
    if data.cutout > smallest:
        raise UserError(
            "cutout is larger than the image",
            where=loaded.where("cutout"),
            got=data.cutout,
            allowed=f"up to {smallest}, the smallest side of training inputs",
        )
