"""Checks of an export before torch is imported: its format, and the folder it is written to."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import Literal, get_args

from paceline.errors import UserError
from paceline.settings.extras import how_to_install

ExportFormat = Literal["safetensors", "torchscript", "onnx", "torch.export"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)


def check_format(name: str, where: str = "--format") -> None:
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        raise UserError(
            "there is no such format" if name else "which format?",
            where=where,
            got=repr(name) if name else "none",
            allowed=", ".join(FORMATS),
            hint=f"did you mean {near[0]}?" if near else None,
        )


def check_packages(format_name: str, where: str) -> None:
    if format_name == "onnx" and importlib.util.find_spec("onnx") is None:
        raise UserError("the package onnx is not installed", where=where, hint=how_to_install("onnx"))


def default_output(run: Path, format_name: str) -> Path:
    """The folder of an export that is given none. A link in a run folder may lead anywhere, so it is not followed."""
    output = run / f"export-{format_name}"
    if output.is_symlink():
        raise UserError("the export folder is a link", where=str(output), hint="remove it, or --output DIR")
    return output


def check_output(output: Path, *, is_forced: bool, hint: str = "--force, or another --output") -> None:
    """Refuse to replace an export without --force, and to replace anything else."""
    if not output.exists():
        return
    is_export = (output / "card.md").is_file() and (output / "preprocessing.json").is_file()
    if output.is_dir() and (is_export or not any(output.iterdir())):
        if is_forced:
            return
        raise UserError("the export folder exists already", where=str(output), hint=hint)
    raise UserError("this is not an export and will not be replaced", where=str(output), hint="another output folder")
