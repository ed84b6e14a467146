"""`paceline inspect`: a page about one step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command
from paceline.errors import EXIT_FINISHED, UserError
from paceline.settings.declare import Arg, FlagsOf, Range
from paceline.settings.schema import Config
from paceline.settings.values import Setting

if TYPE_CHECKING:  # they import torch
    from torch import Tensor

    from paceline.reports.inspect_page import BatchSample, ListedSample
    from paceline.tools.trust.inspection import Answers, StepView
    from paceline.training.replay import Replay

_SIDE = 96  # pixels of a picture on the page
_MOST_LISTED = 24
_MOST_PICTURES = 27  # of the batch: the highest losses


@dataclass(frozen=True)
class Inspect:
    """Rebuild one step of a run, and write a page: pictures, losses, gradients by layer, ranks, and checkpoints.

    The step is replayed in this process from the nearest checkpoint, so nothing extra is stored. The page also lists
    training samples that were forgotten, never learned, or are probably mislabelled, by the stored checkpoints. Flags
    of `train` override settings, for example --data-dir.
    """

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, or its name in runs/."""
    step: Annotated[int, Range(low=1)]
    """The step, from 1."""
    samples: Annotated[int, Range(low=0, high=10_000_000)] = 5000
    """Training samples that are evaluated at each checkpoint, for the lists."""
    html: Annotated[Path | None, Arg("PAGE.html")] = None
    """The page; RUN-step-N.html in this folder unless given."""
    flags: Annotated[tuple[Setting, ...], FlagsOf(Config)] = ()


def inspect(settings: Inspect) -> int:
    from paceline.runs.catalog import find_run

    run = find_run(settings.run).path
    page = settings.html or Path(f"{run.resolve().name}-step-{settings.step}.html")
    if page.is_dir() or not page.parent.is_dir():
        hint = "--html FOLDER/PAGE.html, in an existing folder"
        raise UserError("the page cannot be written there", where="flag --html", got=page, hint=hint)
    from paceline.tools.trust.inspection import answers_over_time, choose_samples, rebuild_step
    from paceline.training.replay import Replay

    with Replay(run, list(settings.flags)) as replay:
        view = rebuild_step(replay, settings.step, _say)
        shown = view.taken.ids.tolist()
        followed = choose_samples(replay, settings.samples, shown)
        _write(page, run, replay, view, answers_over_time(replay, followed, _say))
    print(f"step {settings.step}: loss {view.taken.loss:.6g}, gradient norm {view.taken.grad_norm:.6g}")
    if view.recorded is not None and view.recorded != (view.taken.loss, view.taken.grad_norm):
        print(f"the run has recorded loss {view.recorded[0]:.6g}, gradient norm {view.recorded[1]:.6g}: other bits")
    print(f"the page is {page}")
    return EXIT_FINISHED


def _say(text: str) -> None:
    print(text, flush=True)


def _write(page: Path, run: Path, replay: Replay, view: StepView, answers: Answers | None) -> None:
    from paceline.reports.inspect_page import InspectPage, write_inspect_page

    taken, plan = view.taken, replay.components.plan
    epoch, _ = plan.clock.locate(taken.step - 1)
    accuracies = answers.is_right.float().mean(1).tolist() if answers is not None else []
    write_inspect_page(
        page,
        InspectPage(
            run=run.resolve().name,
            step=taken.step,
            epoch=epoch + 1,
            start=view.start,
            lr=taken.lr,
            loss=taken.loss,
            grad_norm=taken.grad_norm,
            recorded=view.recorded,
            gradient_norms=view.gradient_norms,
            ranks=view.ranks.ranks,
            samples=_samples_of_batch(replay, view, answers),
            checkpoints=answers.steps if answers is not None else [],
            accuracies=accuracies,
            followed=len(answers.ids) if answers is not None else 0,
            lists=_lists(replay, answers) if answers is not None else {},
        ),
    )


def _samples_of_batch(replay: Replay, view: StepView, answers: Answers | None) -> list[BatchSample]:
    from paceline.data.preview import as_png, to_image, to_pixels
    from paceline.reports.inspect_page import BatchSample
    from paceline.reports.page import picture_source

    components, taken, info = replay.components, view.taken, replay.components.plan.info
    pixels = to_pixels(taken.batch.inputs, components.train_data.pipeline) if info.is_image else None
    ids = taken.ids.tolist()
    labels = components.train_data.dataset.labels.cpu()
    per_rank = len(ids) // view.ranks.ranks
    by_loss = sorted(range(len(ids)), key=lambda place: -view.losses[place])
    with_picture = set(by_loss[:_MOST_PICTURES])
    samples = []
    for place, sample in enumerate(ids):
        has_picture = pixels is not None and place in with_picture and info.sample_shape[0] in (1, 3)
        samples.append(
            BatchSample(
                id=sample,
                label=_label(labels[sample], replay),
                loss=view.losses[place],
                rank=place // per_rank,
                original=_original(replay, sample) if has_picture else None,
                augmented=picture_source(as_png(to_image(pixels[place]), _SIDE))
                if has_picture and pixels is not None
                else None,
                answers=_answers_for(replay, answers, sample),
            )
        )
    return samples


def _label(label: Tensor, replay: Replay) -> str:
    from paceline.data.look import label_text

    return label_text(label, replay.components.plan.info)


def _original(replay: Replay, sample: int) -> str:
    from paceline.data.look import original
    from paceline.data.preview import as_png
    from paceline.reports.page import picture_source

    return picture_source(as_png(original(replay.components.train_data.dataset, sample, _SIDE), _SIDE))


def _answers_for(replay: Replay, answers: Answers | None, sample: int) -> list[tuple[str, float, bool]]:
    if answers is None:
        return []
    classes = replay.components.plan.info.classes
    place = int((answers.ids == sample).nonzero()[0])
    return [
        (classes[int(answers.predicted[row, place])], float(answers.label_share[row, place]), bool(right))
        for row, right in enumerate(answers.is_right[:, place].tolist())
    ]


def _lists(replay: Replay, answers: Answers) -> dict[str, tuple[str, Sequence[ListedSample]]]:
    """Training samples worth a look, the worst first."""
    import torch

    count, forgotten = len(answers.steps), answers.forgotten()
    doubt = answers.predicted_share[-1] - answers.label_share[-1]
    never, wrong = answers.never_learned(), answers.probably_mislabelled()

    def listed(score: Tensor, is_in: Tensor, note: str) -> list[ListedSample]:
        places = torch.nonzero(is_in)[:, 0]
        order = places[score[places].argsort(descending=True, stable=True)][:_MOST_LISTED].tolist()
        return [_listed(replay, answers, place, note) for place in order]

    of = f"of {len(answers.ids):,} training samples, at {count} checkpoints"
    return {
        "Forgotten": (
            f"Right at one checkpoint and wrong at the next, most often first: {int((forgotten > 0).sum()):,} {of}.",
            listed(forgotten.float() + doubt * 0.01, forgotten > 0, "forgotten {forgotten}x"),
        ),
        "Never learned": (
            f"Right at no checkpoint: {int(never.sum()):,} {of}.",
            listed(doubt, never, "{predicted} {share:.0%}"),
        ),
        "Probably mislabelled": (
            f"The last checkpoint is sure of another class, and the label was never likely: {int(wrong.sum()):,} {of}. "
            "Look at them: a hard sample can look the same.",
            listed(doubt, wrong, "{predicted} {share:.0%}"),
        ),
    }


def _listed(replay: Replay, answers: Answers, place: int, note: str) -> ListedSample:
    from paceline.reports.inspect_page import ListedSample

    info, sample = replay.components.plan.info, int(answers.ids[place])
    words = {
        "predicted": info.classes[int(answers.predicted[-1, place])],
        "share": float(answers.predicted_share[-1, place]),
        "forgotten": int(answers.forgotten()[place]),
    }
    picture = _original(replay, sample) if info.is_image and info.sample_shape[0] in (1, 3) else None
    return ListedSample(sample, info.classes[int(answers.labels[place])], note.format(**words), picture)


COMMANDS = (Command("inspect", Inspect, inspect),)
