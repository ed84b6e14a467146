"""`paceline export RUN --format FORMAT`: the best weights of a run as files for other programs."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.arguments import TRUST_HELP
from paceline.errors import UserError
from paceline.runs.find import locate_run
from paceline.runs.folder import require_run_folder
from paceline.training.export_request import FORMATS, check_format, check_output

_VALUE_FLAGS = ("--format", "--output", "--data-dir")
_SWITCH = "--force"
_USAGE = f"""\
usage: paceline export RUN --format {"|".join(FORMATS)} [--output DIR] [--force] [--data-dir PATH]
                       [--trust-code]

Write a run's best weights, how to prepare inputs, the labels and a model card into DIR (RUN/export-FORMAT
if not given), load the model again and compare its logits with the run's. --force replaces an earlier export.
{TRUST_HELP}
"""


@dataclass(frozen=True)
class _Request:
    run: Path
    format_name: str
    output: Path
    is_forced: bool
    flags: list[str]  # for the run's config


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return 0
    request = _read_request(arguments)
    require_run_folder(request.run)
    check_output(request.output, is_forced=request.is_forced)
    if request.format_name == "onnx" and importlib.util.find_spec("onnx") is None:
        raise UserError("the package onnx is not installed", where="--format onnx", hint="pip install 'paceline[onnx]'")
    from paceline.training.export import export_run

    for line in export_run(request.run, request.format_name, request.output, request.flags):
        print(line)
    return 0


def _read_request(arguments: list[str]) -> _Request:
    words, values, is_forced = [], {}, False
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, has_value, value = token.partition("=")
        if not token.startswith("--"):
            words.append(token)
        elif token == _SWITCH:
            is_forced = True
        elif name not in _VALUE_FLAGS:
            raise _unknown_flag(token)
        elif has_value:
            values[name] = value
        else:
            values[name] = rest.pop(0) if rest and not rest[0].startswith("--") else ""
    for name, value in values.items():
        if not value:
            raise UserError(f"{name} needs a value", where="the command line")
    if len(words) != 1:
        raise UserError("export takes one run folder", got=" ".join(words) or "none", hint="paceline export RUN")
    folder, format_name = locate_run(words[0]), values.get("--format", "")
    check_format(format_name)
    output = Path(values.get("--output", folder / f"export-{format_name}"))
    flags = ["--data-dir", values["--data-dir"]] if "--data-dir" in values else []
    return _Request(folder, format_name, output, is_forced, flags)


def _unknown_flag(token: str) -> UserError:
    known = (*_VALUE_FLAGS, _SWITCH)
    near = difflib.get_close_matches(token.partition("=")[0], known, n=1)
    return UserError(
        f"unknown flag {token!r}", allowed=", ".join(known), hint=f"did you mean {near[0]}?" if near else None
    )
