"""The page of `paceline data look`: pictures and facts of a data set, as a recipe uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import paceline
from paceline.reports.charts import Chart, Series, Table
from paceline.reports.page import Block, Gallery, Picture, Section, Tile, Tiles, Tone, write_page

if TYPE_CHECKING:  # they import torch
    from paceline.data.dataset import Channels, DatasetInfo
    from paceline.data.look import DataFacts, NumberFacts, Place

_MOST_ROWS = 50  # of duplicates and unreadable files
_MOST_SIZES = 10
_MOST_BARS = 60
_MOST_NUMBERS = 4  # of a regression, in the summary
_CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}
_FAR = 0.1  # a mean or deviation that differs by more is marked


@dataclass(frozen=True)
class SampleRow:
    """One training sample: its picture, and what training and evaluation make of it."""

    title: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class DataPage:
    recipe: str
    source: str  # the data set and its folder
    info: DatasetInfo
    facts: DataFacts
    augmentation: str
    used_mean: Channels  # in the normalisation
    used_std: Channels
    rows: Sequence[SampleRow]


def write_data_page(path: Path, page: DataPage) -> Path:
    verdict, tone = judge_data(page.facts)
    sections = [
        Section("Summary", [Tiles(_tiles(page))]),
        Section("Pictures and model inputs", _samples(page), "inputs"),
        Section("Classes", _classes(page) if page.facts.per_class else []),
        Section("Numbers", [block for number in page.facts.numbers for block in _number(number)]),
        Section("Sizes", _sizes(page.facts)),
        Section("Mean and deviation", _statistics(page), "statistics"),
        Section("Duplicates", _duplicates(page)),
        Section("Unreadable files", _unreadable(page.facts), "unreadable"),
    ]
    return write_page(
        path,
        f"Data of {page.recipe}",
        [section for section in sections if section.blocks],
        subtitle=page.source,
        verdict=verdict,
        tone=tone,
        footer=f"Written by paceline {paceline.__version__} (`paceline data look`).",
    )


def judge_data(facts: DataFacts) -> tuple[str, Tone]:
    """One sentence, and how serious it is."""
    if not facts.num_checked:
        return "Samples were **not compared or decoded** (`--no-check`).", ""
    found = []
    if facts.leaks:
        found.append(f"{_count(len(facts.leaks), 'sample')} of the training set also in validation or test")
    if facts.conflicts:
        found.append(f"{_count(len(facts.conflicts), 'sample')} with different labels")
    if facts.unreadable:
        found.append(f"{_count(len(facts.unreadable), 'file')} that cannot be read")
    if found:
        return f"**Look at this:** {'; '.join(found)}.", "bad" if facts.leaks else "warn"
    return f"**No duplicates** between parts and no unreadable files ({facts.num_checked:,} samples checked).", "good"


def _tiles(page: DataPage) -> list[Tile]:
    facts, info = page.facts, page.info
    tiles = [Tile(part, f"{count:,}", "samples") for part, count in facts.num_samples.items()]
    counts = [count for count in facts.per_class.get("train", ()) if count]
    if counts:
        ratio = max(counts) / min(counts)
        note = f"largest {ratio:.3g} x the smallest"
        tiles.append(Tile("classes", f"{info.num_classes:,}", note, "warn" if ratio > 10 else ""))
    tiles += [
        Tile(number.name, f"{number.spread['train'][1]:.4g}", f"mean, deviation {number.spread['train'][2]:.3g}")
        for number in facts.numbers[:_MOST_NUMBERS]
    ]
    if info.is_image and facts.sizes:
        (width, height), _ = max(facts.sizes.items(), key=lambda item: item[1])
        note = "all pictures" if len(facts.sizes) == 1 else f"most frequent of {len(facts.sizes):,} sizes"
        tiles.append(Tile("size", f"{width} x {height}", note))
    if facts.num_checked:
        tiles += [
            Tile("in several parts", f"{len(facts.leaks):,}", "equal pixels", "bad" if facts.leaks else "good"),
            Tile("unreadable", f"{len(facts.unreadable):,}", "files", "warn" if facts.unreadable else "good"),
        ]
    return tiles


def _samples(page: DataPage) -> list[Block]:
    if not page.rows:
        return ["These samples are vectors, so there are no pictures."]
    blocks: list[Block] = [
        f"Augmentation: {page.augmentation}. Training makes these inputs in these epochs, on any number of ranks."
    ]
    for row in page.rows:
        blocks += [row.title, Gallery(row.pictures)]
    return blocks


def _classes(page: DataPage) -> list[Block]:
    facts, classes = page.facts, page.info.classes
    blocks: list[Block] = []
    if len(classes) <= _MOST_BARS:
        series = [Series(part, counts, x=classes) for part, counts in facts.per_class.items()]
        blocks.append(
            Chart(*("classes", "Samples of each class", "class", "samples", series), kind="stacked-bar", wide=True)
        )
    total = facts.num_samples["train"]
    rows: list[list[str | float | int | None]] = []
    for number, name in enumerate(classes):
        counts = [of_part[number] for of_part in facts.per_class.values()]
        rows.append([name, *counts, f"{counts[0] / total:.1%}"])
    return [*blocks, Table(("class", *facts.per_class, "of train"), rows)]


def _number(number: NumberFacts) -> list[Block]:
    series = [Series(part, counts, x=number.bins) for part, counts in number.per_bin.items()]
    identity, title = f"number-{number.name}", f"Samples by {number.name}"
    rows = [(part, *(f"{value:.5g}" for value in values)) for part, values in number.spread.items()]
    return [
        Chart(*(identity, title, number.name, "samples", series), kind="stacked-bar", wide=True),
        Table((number.name, "smallest", "mean", "deviation", "largest"), rows),
    ]


def _sizes(facts: DataFacts) -> list[Block]:
    if len(facts.sizes) < 2:
        return []
    common = sorted(facts.sizes.items(), key=lambda item: (-item[1], item[0]))
    widths = sorted(width for (width, _), count in facts.sizes.items() for _ in range(count))
    heights = sorted(height for (_, height), count in facts.sizes.items() for _ in range(count))
    rows = [
        (name, values[0], values[len(values) // 2], values[-1])
        for name, values in (("width", widths), ("height", heights))
    ]
    shown = [(f"{width} x {height}", count) for (width, height), count in common[:_MOST_SIZES]]
    rest = sum(count for _, count in common[_MOST_SIZES:])
    if rest:
        shown.append((f"{len(common) - _MOST_SIZES:,} other sizes", rest))
    return [
        Table(("pixels", "smallest", "median", "largest"), rows),
        Table(("width x height", "pictures"), shown),
    ]


def _statistics(page: DataPage) -> list[Block]:
    facts = page.facts
    if not page.used_mean:
        one = [("all values", f"{facts.mean[0]:.4g}", f"{facts.std[0]:.4g}")]
        return [f"Of {facts.num_measured:,} training samples.", Table(("", "mean", "deviation"), one)]
    names = _CHANNELS.get(len(facts.mean), tuple(map(str, range(len(facts.mean)))))
    values = list(zip(names, facts.mean, page.used_mean, facts.std, page.used_std, strict=True))
    rows = [(name, *(f"{value:.4f}" for value in row)) for name, *row in values]
    is_far = any(abs(mean - used) > _FAR or abs(std - other) > _FAR for _, mean, used, std, other in values)
    columns = ("channel", "mean", "mean in training", "deviation", "deviation in training")
    far = "The normalisation uses other values. Pretrained weights expect those of ImageNet." if is_far else ""
    text = f"Of {facts.num_measured:,} training samples; black is 0 and white is 1. {far}".strip()
    return [text, Table(columns, rows)]


def _duplicates(page: DataPage) -> list[Block]:
    facts = page.facts
    if not facts.num_checked:
        return []
    blocks: list[Block] = [
        f"Samples are equal if all their pixels are. {_count(facts.repeats, 'sample')} of a part repeat an earlier one "
        "of the same part."
    ]
    kinds = (
        ("In training and in validation or test", facts.leaks),
        ("With different labels", facts.conflicts),
    )
    for title, groups in kinds:
        if groups:
            more = f", the first {_MOST_ROWS}" if len(groups) > _MOST_ROWS else ""
            rows = [(number, *_cells(group)) for number, group in enumerate(groups[:_MOST_ROWS], 1)]
            caption = f"{title}: {len(groups):,}{more}"
            blocks.append(Table(("", "parts", "labels", "samples"), rows, caption=caption))
    return blocks


def _cells(group: Sequence[Place]) -> tuple[str, str, str]:
    parts = ", ".join(dict.fromkeys(place.part for place in group))
    labels = "; ".join(dict.fromkeys(place.label for place in group))
    more = f" and {len(group) - 4} more" if len(group) > 4 else ""
    names = [f"{place.part} {place.name}" if place.name.startswith("sample ") else place.name for place in group[:4]]
    return parts, labels, ", ".join(names) + more


def _unreadable(facts: DataFacts) -> list[Block]:
    if not facts.unreadable:
        return []
    more = [(f"and {len(facts.unreadable) - _MOST_ROWS:,} more", "")] if len(facts.unreadable) > _MOST_ROWS else []
    return [Table(("file", "why"), [*facts.unreadable[:_MOST_ROWS], *more])]


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
