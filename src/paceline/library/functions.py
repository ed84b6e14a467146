"""Turns function objects into names that ranks can import.

A rank is another process and imports what it needs. A function of a file becomes `FILE.py:FUNCTION`, a function of a
package becomes `package.module:FUNCTION`. A function of a notebook has no file; its source is written into the run
folder (notebook_source.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import UserError


def reference_to(function: Callable[..., Any], *, where: str, notebook_file: Path) -> str:
    """`notebook_file` is the file to which functions of a notebook will be written."""
    module, name = _home_of(function, where)
    if _is_notebook(module):
        return f"{notebook_file}:{name}"
    spec = module.__spec__
    if spec is not None and ("." in spec.name or getattr(module, "__file__", None) is None):
        return f"{spec.name}:{name}"  # a single file of a package could not import its siblings
    return f"{Path(str(module.__file__)).absolute()}:{name}"


def is_of_notebook(function: Callable[..., Any], *, where: str) -> bool:
    """Whether the function is defined in a notebook or prompt, without a file that ranks can import."""
    return _is_notebook(_home_of(function, where)[0])


def _is_notebook(module: ModuleType) -> bool:
    return module.__name__ == "__main__" and getattr(module, "__file__", None) is None


def _home_of(function: Callable[..., Any], where: str) -> tuple[ModuleType, str]:
    name = str(getattr(function, "__qualname__", ""))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not function:
        raise UserError(
            "ranks are other processes and cannot import this function",
            where=where,
            got=repr(function),
            allowed="a function or class defined at the top level of a file, a module or a notebook",
            hint="define it at the top level; no lambda, no nested function, no functools.partial",
        )
    return module, name
