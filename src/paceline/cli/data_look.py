"""`paceline data look`: a page with pictures and facts of a recipe's data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command, RecipeSettings
from paceline.cli.data import Progress
from paceline.errors import EXIT_FINISHED, UserError
from paceline.runtime.resources import usable_cores
from paceline.settings.declare import Arg, Range
from paceline.settings.tasks import REGRESSION

if TYPE_CHECKING:  # they import torch
    from PIL.Image import Image
    from torch import Tensor

    from paceline.data.augment import Pipeline
    from paceline.data.dataset import DatasetInfo, LoadedData
    from paceline.reports.data_page import SampleRow
    from paceline.reports.page import Picture
    from paceline.settings.schema import Config

_LARGEST_SIDE = 160  # pixels of a picture on the page
_MOST_SHARES = 3  # classes of a mixed target that are named


@dataclass(frozen=True)
class Look(RecipeSettings):
    """Write a page that shows a recipe's data: pictures, the model's inputs, labels, sizes, duplicates.

    The page is one HTML file without links to other files. It shows training samples beside the inputs that training
    makes of them in some epochs, and what they are mixed with. Pictures of a folder or a table are decoded, and
    samples of train, validation and test are compared by a hash of their pixels. Nothing is trained or changed.
    """

    at_epochs: Annotated[
        tuple[int, ...], Range(low=0, high=10**6), Arg("N,N", many="commas", allowed="whole numbers, for example 0,1,9")
    ] = (0, 1)
    """The epochs whose inputs are shown, counted from 0."""
    samples: Annotated[int, Range(low=1, high=200)] = 6
    """How many training samples are shown."""
    check: bool = True
    """Read every sample: sizes, duplicates and unreadable files. Takes as long as reading the data once."""
    html: Annotated[Path, Arg("PAGE.html")] = Path("data.html")
    """The page."""
    workers: Annotated[int | None, Range(low=1, high=256)] = None
    """Processes that decode (one per core unless given)."""


def look(settings: Look) -> int:
    from paceline.launch.request import read_request

    page = settings.html
    if page.is_dir() or not page.parent.is_dir():
        hint = "--html FOLDER/PAGE.html, in an existing folder"
        raise UserError("the page cannot be written there", where="flag --html", got=page, hint=hint)
    loaded = read_request(settings.recipe, settings.flags)
    config = loaded.config
    late = [epoch for epoch in settings.at_epochs if epoch >= config.train.epochs]
    if late:
        raise UserError(
            "the run has no such epoch",
            where="flag --at-epochs",
            got=", ".join(map(str, late)),
            allowed=f"0 to {config.train.epochs - 1} (--epochs {config.train.epochs})",
        )
    return _write(settings, config, loaded.recipe_name)


def _write(settings: Look, config: Config, recipe: str) -> int:
    from paceline.data.augment import build_pipeline
    from paceline.data.look import look_at_data
    from paceline.data.registry import load_dataset
    from paceline.reports.data_page import DataPage, judge_data, write_data_page
    from paceline.training.plan import make_plan, split_samples

    # Unreadable pictures are listed on the page. Training would stop at them unless --unreadable allows them.
    data = load_dataset(replace(config.data, unreadable=10**9), config.train.seed)
    make_plan(config, data.info, 1)  # the checks that need the data
    pipeline = build_pipeline(config.data, data.info, config.train.seed)
    train_ids, validation_ids = split_samples(data.info, config)
    workers = settings.workers or usable_cores()
    with Progress("checked", "samples") as progress:
        facts = look_at_data(
            data, train_ids, validation_ids, workers=workers, progress=progress if settings.check else None
        )
    rows = _rows(settings, config, data, pipeline, train_ids) if data.info.is_image else []
    folder = "" if config.data.dataset in ("shapes", "synthetic") else f" in {config.data.data_dir}"
    source = f"{config.data.dataset}{folder}"
    described = pipeline.describe()
    mean, std = (pipeline.mean, pipeline.std) if data.info.is_image else ((), ())
    write_data_page(settings.html, DataPage(recipe, source, data.info, facts, described, mean, std, rows))
    print(judge_data(facts)[0].replace("**", "").replace("`", ""))
    print(f"the page is {settings.html}")
    return EXIT_FINISHED


def _rows(settings: Look, config: Config, data: LoadedData, pipeline: Pipeline, train_ids: Tensor) -> list[SampleRow]:
    from paceline.data.look import choose_samples, label_text
    from paceline.data.preview import to_image, to_pixels, training_inputs
    from paceline.data.sampling import sampling_of
    from paceline.reports.data_page import SampleRow

    info, train, batch = data.info, data.train, config.train.global_batch_size
    sampling = sampling_of(config.data, train, train_ids)
    batches = {
        epoch: sampling.batches(train_ids, config.train.seed, epoch, batch, pipeline.repeats)
        for epoch in settings.at_epochs
    }
    rows = []
    for index in choose_samples(train.labels, train_ids, settings.samples, info.task):
        pictures, left_out = [_original(data, index, "original")], []
        for epoch in settings.at_epochs:
            repeats = training_inputs(train, pipeline, batches[epoch], index, epoch)
            left_out += [] if repeats else [str(epoch)]
            for number, found in enumerate(repeats):
                when = f"epoch {epoch}" + (f", repeat {number}" if len(repeats) > 1 else "")
                pictures.append(_picture(to_image(found.pixels), when, _target(found.target, info)))
                if found.partner is not None:
                    pictures.append(_original(data, found.partner, f"partner in {when}"))
        inputs = pipeline.for_evaluation(train.read(train_ids.new_tensor([index])))
        pictures.append(_picture(to_image(to_pixels(inputs, pipeline)[0]), "in evaluation", ""))
        note = f"; not trained on in epoch {', '.join(left_out)}" if left_out else ""
        label = label_text(train.labels[index], info)
        rows.append(SampleRow(f"**{label}**, training sample {index}{note}", pictures))
    return rows


def _original(data: LoadedData, index: int, caption: str) -> Picture:
    import torch

    from paceline.data.look import label_text, original
    from paceline.data.preview import to_image
    from paceline.errors import DataError

    try:
        image = original(data.train, index, _LARGEST_SIDE)
    except DataError:  # training would get a grey picture
        image = to_image(data.train.read(torch.tensor([index]))[0])
    _, height, width = data.info.sample_shape
    label = label_text(data.train.labels[index], data.info)
    return _picture(image, caption, f"{label}, read as", (width, height))


def _picture(image: Image, caption: str, about: str, size: tuple[int, int] | None = None) -> Picture:
    from paceline.data.preview import as_png
    from paceline.reports.page import Picture, picture_source

    width, height = size or image.size
    between = "" if not about else " " if size else ", "
    note = f"{about}{between}{width}x{height}"
    return Picture(picture_source(as_png(image, _LARGEST_SIDE)), f"{caption}: {about}", caption, note)


def _target(target: Tensor, info: DatasetInfo) -> str:
    """The classes of a target, those of a mixed one with their shares; or its numbers."""
    from paceline.data.look import label_text

    if info.task == REGRESSION or target.dim() == 0:
        return label_text(target, info)
    ranked = [(float(share), name) for share, name in zip(target, info.classes, strict=True) if share > 0.005]
    ranked.sort(reverse=True)
    if all(share == 1 for share, _ in ranked):
        return label_text(target, info)
    return " + ".join(f"{share:.0%} {name}" for share, name in ranked[:_MOST_SHARES])


COMMANDS = (Command("data look", Look, look),)
