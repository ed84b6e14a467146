"""The page of `paceline inspect`: one step of a run, and its samples at each checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.reports.charts import Chart, Series, Table
from paceline.reports.page import Block, Details, Gallery, Picture, Section, Slider, Tile, Tiles, write_page

_MOST_LAYERS = 60
_MOST_IDS = 8


@dataclass(frozen=True)
class BatchSample:
    """A sample of the step's batch."""

    id: int
    label: str
    loss: float
    rank: int
    original: str | None  # a data URI; None: the sample is no picture
    augmented: str | None
    answers: Sequence[
        tuple[str, float, bool]
    ]  # at each checkpoint: the class, the probability of the label, is it right


@dataclass(frozen=True)
class ListedSample:
    """A training sample of one of the lists."""

    id: int
    label: str
    note: str
    picture: str | None


@dataclass(frozen=True)
class InspectPage:
    run: str
    step: int
    epoch: int
    start: int
    lr: float
    loss: float
    grad_norm: float
    recorded: tuple[float, float] | None  # loss and gradient norm
    gradient_norms: dict[str, float]
    ranks: int
    samples: Sequence[BatchSample]
    checkpoints: Sequence[int]
    accuracies: Sequence[float]  # of the followed training samples, at each checkpoint
    followed: int  # training samples that were evaluated
    lists: dict[str, tuple[str, Sequence[ListedSample]]]  # title: explanation, samples


def write_inspect_page(path: Path, page: InspectPage) -> Path:
    same = page.recorded is not None and page.recorded == (page.loss, page.grad_norm)
    if page.recorded is None:
        verdict, tone = "The run has not recorded the loss of this step.", ""
    elif same:
        verdict, tone = "The replay gives **the recorded bits** of loss and gradient norm.", "good"
    else:
        verdict, tone = f"The run has recorded loss {page.recorded[0]:.7g}: the replay **gives other bits**.", "warn"
    sections = [
        Section("Summary", [Tiles(_tiles(page))]),
        Section("Batch", _batch(page)),
        Section("Gradients by layer", _gradients(page), "gradients"),
        Section("Ranks", _ranks(page)),
        Section("Checkpoints", _checkpoints(page)),
        *(
            Section(title, [text, _gallery_of(listed) if listed else "None."])
            for title, (text, listed) in page.lists.items()
        ),
    ]
    return write_page(
        path,
        f"Step {page.step} of {page.run}",
        [section for section in sections if section.blocks],
        subtitle="Rebuilt from the settings, the data and the checkpoints of the run. Nothing else was stored.",
        verdict=verdict,
        tone=tone,  # type: ignore[arg-type]
        footer=f"Written by paceline {paceline.__version__} (`paceline inspect`).",
    )


def _tiles(page: InspectPage) -> list[Tile]:
    where = f"checkpoint of step {page.start}" if page.start else "the initial weights"
    return [
        Tile("step", f"{page.step:,}", f"epoch {page.epoch}"),
        Tile("loss", f"{page.loss:.5g}", "mean of the batch"),
        Tile("gradient norm", f"{page.grad_norm:.4g}", "before clipping"),
        Tile("learning rate", f"{page.lr:.4g}"),
        Tile("batch", f"{len(page.samples):,}", f"samples on {page.ranks} rank{'s' if page.ranks > 1 else ''}"),
        Tile("replayed from", f"{page.start:,}", where),
    ]


def _batch(page: InspectPage) -> list[Block]:
    """The samples with the highest loss first; each as it is in the data, and as the model got it."""
    ordered = sorted(page.samples, key=lambda sample: -sample.loss if math.isfinite(sample.loss) else 0.0)
    pictures = []
    for sample in ordered:
        if sample.original is None or sample.augmented is None:
            continue
        name, note = f"{sample.id}: {sample.label}", f"loss {sample.loss:.3g}, rank {sample.rank}"
        pictures.append(Picture(sample.original, name, name, note, beside=sample.augmented))
    rows = [(sample.id, sample.label, f"{sample.loss:.5g}", sample.rank) for sample in ordered]
    table = Table(("sample", "label", "loss", "rank"), rows)
    text = "Highest loss first. Left: the sample in the data. Right: as the model got it in this step."
    shown: list[Block] = [text, Gallery(pictures)] if pictures else []
    return [*shown, Details(f"All {len(rows)} samples as a table", [table], is_open=not pictures)]


def _gradients(page: InspectPage) -> list[Block]:
    layers = list(page.gradient_norms.items())
    if not layers:
        return ["The step was left out: it has no gradients that were used."]
    largest = sorted(layers, key=lambda item: -item[1])[:_MOST_LAYERS]
    kept = {name for name, _ in largest}
    shown = [(name, norm) for name, norm in layers if name in kept]
    series = Series("norm", [norm for _, norm in shown], x=[name for name, _ in shown])
    chart = Chart(*("gradient-norms", "Norm of the gradient", "parameter", "norm", [series]), kind="bar", wide=True)
    if len(shown) == len(layers):
        return [chart]
    rows = [(name, f"{norm:.5g}") for name, norm in layers]
    table = Table(("parameter", "norm of its gradient"), rows)
    return [chart, Details(f"All {len(layers)} parameters as a table", [table])]


def _ranks(page: InspectPage) -> list[Block]:
    rows: list[tuple[str | float | int | None, ...]] = []
    for rank in range(page.ranks):
        own = [sample for sample in page.samples if sample.rank == rank]
        losses = [sample.loss for sample in own if math.isfinite(sample.loss)]
        ids = ", ".join(str(sample.id) for sample in own[:_MOST_IDS]) + (", ..." if len(own) > _MOST_IDS else "")
        mean = f"{sum(losses) / len(losses):.5g}" if losses else "-"
        rows.append((f"rank {rank}", len(own), mean, ids))
    return [Table(("rank", "samples", "mean loss", "sample numbers"), rows)]


def _checkpoints(page: InspectPage) -> list[Block]:
    if not page.checkpoints:
        return []
    frames: list[tuple[str, Sequence[Block]]] = []
    for number, step in enumerate(page.checkpoints):
        pictures = [
            Picture(
                sample.original,
                f"{sample.id}: {sample.label}",
                f"{sample.id}: {sample.label}",
                f"{sample.answers[number][0]}, own label {sample.answers[number][1]:.0%}",
                "good" if sample.answers[number][2] else "bad",
            )
            for sample in page.samples
            if sample.original is not None and sample.answers
        ]
        rows = [
            (sample.id, sample.label, sample.answers[number][0], f"{sample.answers[number][1]:.1%}")
            for sample in page.samples
            if sample.answers
        ]
        right = sum(sample.answers[number][2] for sample in page.samples if sample.answers)
        tiles = Tiles(
            [
                Tile("training accuracy", f"{page.accuracies[number]:.1%}", f"of {page.followed:,} samples"),
                Tile("this batch", f"{right} of {len(rows)}", "predicted with their label"),
            ]
        )
        table = Table(("sample", "label", "prediction", "probability of the label"), rows)
        frames.append((f"Checkpoint of step {step}", [tiles, Gallery(pictures) if pictures else table]))
    text = "What the weights of each stored checkpoint say of the samples of this batch, without augmentation."
    return [text, Slider("Checkpoint", frames)]


def _gallery_of(listed: Sequence[ListedSample]) -> Block:
    if all(sample.picture is None for sample in listed):
        return Table(("sample", "label", ""), [(sample.id, sample.label, sample.note) for sample in listed])
    names = [f"{sample.id}: {sample.label}" for sample in listed]
    return Gallery(
        [
            Picture(sample.picture, name, name, sample.note)
            for name, sample in zip(names, listed, strict=True)
            if sample.picture is not None
        ]
    )
