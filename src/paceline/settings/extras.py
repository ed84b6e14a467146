"""How to install the optional packages, for messages: the extras of pyproject.toml."""

from __future__ import annotations

import shlex
from pathlib import Path

_CLONE = Path(__file__).resolve().parents[3]  # the folder with pyproject.toml, if Paceline is installed with `pip -e`
_OF_FLOWS = ("metaflow", "runnable", "kubernetes", "s3")  # their versions are in a file of their own


def how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation: `pip install 'paceline[onnx]'`, or the same in a clone."""
    if not (_CLONE / "pyproject.toml").is_file():
        return f"pip install 'paceline[{extra}]'"
    is_here = Path().samefile(_CLONE)
    constraints = "constraints-flows.txt" if extra in _OF_FLOWS else "constraints.txt"
    place = "." if is_here else str(_CLONE)
    file = constraints if is_here else str(_CLONE / constraints)
    return f"pip install -e {shlex.quote(f'{place}[{extra}]')} -c {shlex.quote(file)}"
