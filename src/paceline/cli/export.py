"""`paceline export RUN --format FORMAT`: the best weights of a run as files for other programs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from paceline.cli.command import Command
from paceline.errors import EXIT_FINISHED, UserError
from paceline.runs.find import locate_run
from paceline.runs.folder import require_run_folder
from paceline.settings.declare import Arg


@dataclass(frozen=True)
class Export:
    """Write a run's best weights, how to prepare inputs, the labels and a model card.

    Then load the model again and compare its logits with the run's. --trust-code executes functions that the run
    folder names, although you did not train it on this machine.
    """

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, or its name in runs/."""
    format: Literal["safetensors", "torchscript", "onnx", "torch.export"]
    """The format of the model."""
    output: Path | None = None
    """The folder to write (RUN/export-FORMAT unless given)."""
    force: bool = False
    """Replace an earlier export."""
    data_dir: str | None = None
    """The folder of the data sets, if it is not the run's."""


def export(settings: Export) -> int:
    folder = locate_run(settings.run)
    output = settings.output or folder / f"export-{settings.format}"
    require_run_folder(folder)
    _check_output(output, is_forced=settings.force)
    if settings.format == "onnx" and importlib.util.find_spec("onnx") is None:
        raise UserError("the package onnx is not installed", where="--format onnx", hint="pip install 'paceline[onnx]'")
    from paceline.training.export import export_run

    flags = [] if settings.data_dir is None else [f"--data-dir={settings.data_dir}"]
    for line in export_run(folder, settings.format, output, flags):
        print(line)
    return EXIT_FINISHED


def _check_output(output: Path, *, is_forced: bool) -> None:
    """Replace only an earlier export, and only with --force."""
    if not output.exists():
        return
    is_export = (output / "card.md").is_file() and (output / "preprocessing.json").is_file()
    if output.is_dir() and (is_export or not any(output.iterdir())):
        if is_forced:
            return
        raise UserError("the export folder exists already", where=str(output), hint="--force, or another --output")
    raise UserError("this is not an export and will not be replaced", where=str(output), hint="another --output DIR")


COMMANDS = (Command("export", Export, export),)
