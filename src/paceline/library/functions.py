"""Functions given as themselves, turned into the names by which ranks can find them.

A rank is another process: it imports what it needs. A function of a file becomes `FILE.py:FUNCTION`, one of a package
`package.module:FUNCTION`. One that was typed into a notebook has no file; its source is written into the run folder
(notebook_source.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import UserError


def reference_to(function: Callable[..., Any], *, where: str, notebook_file: Path) -> str:
    """`notebook_file` is where the functions of a notebook will be found."""
    module, name = _home_of(function, where)
    if _is_notebook(module):
        return f"{notebook_file}:{name}"
    spec = module.__spec__
    if spec is not None and ("." in spec.name or getattr(module, "__file__", None) is None):
        return f"{spec.name}:{name}"  # in a package a file alone would lose its neighbours
    return f"{Path(str(module.__file__)).absolute()}:{name}"


def is_of_notebook(function: Callable[..., Any], *, where: str) -> bool:
    """Whether it was typed in and has no file that ranks could import."""
    return _is_notebook(_home_of(function, where)[0])


def _is_notebook(module: ModuleType) -> bool:
    return module.__name__ == "__main__" and getattr(module, "__file__", None) is None


def _home_of(function: Callable[..., Any], where: str) -> tuple[ModuleType, str]:
    name = str(getattr(function, "__qualname__", ""))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not function:
        raise UserError(
            "ranks are other processes, and cannot find this function by a name",
            where=where,
            got=repr(function),
            allowed="a function or class defined at the top level of a file, a module or a notebook",
            hint="def it at the top level; no lambda, no function inside a function, no functools.partial",
        )
    return module, name
