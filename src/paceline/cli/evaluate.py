"""`paceline evaluate`, `predict`, `export` and `compare`: commands for runs that have ended."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.cli.command import Command
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError, printable_line
from paceline.settings.declare import Arg, FlagsOf
from paceline.settings.schema import Config
from paceline.settings.tasks import LABEL_THRESHOLD, MULTI_LABEL, REGRESSION
from paceline.settings.values import Setting
from paceline.training.export_request import ExportFormat, check_output, check_packages, default_output

_SHOWN = 3


@dataclass(frozen=True)
class Evaluate:
    """Test a run's best weights, or those of another checkpoint, and write evaluation.json beside its results.

    RUN may also be the folder of one checkpoint; without its run around it, nothing is written. Flags of `train`
    override the settings of the run, for example --device or --data-dir. --trust-code executes functions that the run
    folder names, although you did not train it on this machine.
    """

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, its name in runs/, or the folder of a checkpoint."""
    checkpoint: Annotated[str, Arg("best|latest|STEP", allowed="best, latest, or a step")] = ""
    """The checkpoint to test (the best one unless given)."""
    flags: Annotated[tuple[Setting, ...], FlagsOf(Config)] = ()


@dataclass(frozen=True)
class Predict:
    """Print the three likeliest classes of each picture; of other tasks its labels, or its numbers.

    --trust-code executes functions that the run folder names, although you did not train it on this machine.
    """

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, or its name in runs/."""
    image: Annotated[tuple[str, ...], Arg(place="word", completes="file")] = ()
    """Pictures to classify."""


def evaluate(settings: Evaluate) -> int:
    from paceline.checkpoints.named import find_named
    from paceline.runs.catalog import locate_run
    from paceline.runs.folder import write_json

    path = locate_run(settings.run)
    find_named(path, settings.checkpoint)  # before torch is imported: a mistake ends here
    from paceline.training.reuse import evaluate_run, open_run

    run_ = open_run(path, settings.flags, checkpoint=settings.checkpoint)
    evaluation = evaluate_run(run_)
    classes = run_.classes
    print(f"{path}: weights of step {run_.checkpoint.step}, {run_.checkpoint.path.name}")
    accuracy = "" if evaluation.accuracy is None else f"accuracy {evaluation.accuracy:.2%}, "
    print(f"test {accuracy}loss {evaluation.loss:.4f}, {evaluation.samples:,} samples")
    print(", ".join(f"{name} {value:.4f}" for name, value in evaluation.metrics.items()))
    name, values = next(iter(evaluation.per_class.items()))  # the one that matters most comes first
    form = "{:.4g}" if name == "mae" else "{:.2%}"
    print(f"{name.replace('_', ' ')} of each {'number' if name == 'mae' else 'class'}:")
    for label, value in zip(classes, values, strict=True):
        print(f"  {printable_line(label):<16} {'no samples' if value is None else form.format(value)}")
    answers = evaluation.to_json(classes, step=run_.checkpoint.step, checkpoint=run_.checkpoint.path.name)
    if run_.folder is not None:
        try:
            write_json(run_.folder / "evaluation.json", answers)
        except OSError as error:  # another person's run, or a read-only disk
            print(f"note: evaluation.json was not written: {error.strerror}")
    return EXIT_FINISHED


def describe_answers(task: str, classes: tuple[str, ...], answers: list[float]) -> str:
    """Of one picture: the likeliest classes, all labels it has, or its numbers."""
    if task == REGRESSION:
        return ", ".join(f"{name} {value:.6g}" for name, value in zip(classes, answers, strict=True))
    ranked = sorted(zip(answers, classes, strict=True), reverse=True)
    if task == MULTI_LABEL:
        chosen = [entry for entry in ranked if entry[0] > LABEL_THRESHOLD]
        likeliest = f"no label ({ranked[0][1]} {ranked[0][0]:.1%} is the likeliest)"
        return ", ".join(f"{name} {probability:.1%}" for probability, name in chosen) or likeliest
    return ", ".join(f"{name} {probability:.1%}" for probability, name in ranked[:_SHOWN])


def predict(settings: Predict) -> int:
    from paceline.runs.catalog import locate_run
    from paceline.runs.folder import require_run_folder

    if not settings.image:
        raise UserError("no picture to classify", hint=f"paceline predict {settings.run} PICTURE...")
    pictures = [Path(name) for name in settings.image]
    for picture in pictures:
        if picture.is_dir():
            pattern = f"{shlex.quote(str(picture))}/*{_most_common_ending(picture)}"
            hint = f"paceline predict {settings.run} {pattern}"
            raise UserError("a folder is not a picture", got=f"{picture}/", allowed="picture files", hint=hint)
        if not picture.is_file():
            raise UserError("there is no such picture", got=picture)
    path = locate_run(settings.run)
    require_run_folder(path)
    from paceline.training.reuse import open_run, predict_pictures

    run_ = open_run(path, [])
    classes = run_.classes
    task = run_.record.info.task
    for picture, answers in zip(pictures, predict_pictures(run_, pictures), strict=True):
        print(printable_line(f"{picture}: {describe_answers(task, classes, answers)}"))
    return EXIT_FINISHED


def _most_common_ending(folder: Path) -> str:
    from paceline.data.pictures import EXTENSIONS

    endings = Counter(path.suffix for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    return endings.most_common(1)[0][0] if endings else ".jpg"


@dataclass(frozen=True)
class Export:
    """Write a run's best weights, how to prepare inputs, the labels and a model card.

    Then load the model again and compare its logits with the run's. --trust-code executes functions that the run
    folder names, although you did not train it on this machine.
    """

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, or its name in runs/."""
    format: ExportFormat
    """The format of the model."""
    output: Path | None = None
    """The folder to write (RUN/export-FORMAT unless given)."""
    force: bool = False
    """Replace an earlier export."""
    data_dir: str | None = None
    """The folder of the data sets, if it is not the run's."""


def export(settings: Export) -> int:
    from paceline.runs.catalog import locate_run
    from paceline.runs.folder import require_run_folder

    folder = locate_run(settings.run)
    output = settings.output or default_output(folder, settings.format)
    require_run_folder(folder)
    check_output(output, is_forced=settings.force)
    check_packages(settings.format, where=f"--format {settings.format}")
    from paceline.training.export import export_run

    flags = [] if settings.data_dir is None else [f"--data-dir={settings.data_dir}"]
    for line in export_run(folder, settings.format, output, flags):
        print(line)
    return EXIT_FINISHED


@dataclass(frozen=True)
class Compare:
    """Show whether runs are equal, or where each first differs from the first run. Exit code 0: equal, 1: different.

    Compared are weights, optimizer, losses of steps, metrics of epochs, and every tensor of their newest common
    checkpoint.
    """

    run: Annotated[tuple[str, ...], Arg(place="word", completes="run")]
    """Run folders, or their names in runs/."""
    json: bool = False
    """Print JSON."""
    html: Annotated[Path | None, Arg("PAGE.html", bare="compare.html", bare_unless=(".html", ".htm"))] = None
    """Also write a page with their curves (compare.html, unless another is given)."""


def compare(settings: Compare) -> int:
    from paceline.library.compare import compare as compare_runs  # imported late: --help must be fast

    page = settings.html
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        hint = "--html=FOLDER/PAGE.html, in an existing folder"
        raise UserError("the page cannot be written there", got=page, hint=hint)
    found = compare_runs(settings.run)
    print(json.dumps(found.to_json(), indent=2) if settings.json else found)
    if page is not None:
        found.write_page(page)
        print(f"\nthe page is {page}", file=sys.stderr if settings.json else sys.stdout)
    return EXIT_FINISHED if found.is_equal else EXIT_DIFFERENT


COMMANDS = (
    Command("evaluate", Evaluate, evaluate),
    Command("predict", Predict, predict),
    Command("export", Export, export),
    Command("compare", Compare, compare),
)
