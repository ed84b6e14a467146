"""`paceline export RUN --format FORMAT`: the best weights of a run as files for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.cli.command import Command
from paceline.errors import EXIT_FINISHED
from paceline.runs.find import locate_run
from paceline.runs.folder import require_run_folder
from paceline.settings.declare import Arg
from paceline.training.export_request import ExportFormat, check_output, check_packages, default_output


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


COMMANDS = (Command("export", Export, export),)
