"""`FILE.py:FUNCTION` and `package.module:FUNCTION`: names of the user's own functions.

`check_reference` reads the source but does not run it, so a typing mistake is found before anything starts.
`resolve_reference` imports it. Imports no torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from paceline.errors import PacelineError, UserError, text_of
from paceline.runs.local_code import (
    LocalLoader,
    importing,
    local_modules_compiled,
    module_name_of,
    process_kept,
    read_source,
)


class Resolve(Protocol):
    """Finds the function that a config names: `resolve_reference` below, or the source stored with a run."""

    def __call__(self, name: str, *, where: str) -> Callable[..., Any]: ...


def is_reference(name: str) -> bool:
    return ":" in name


def check_reference(name: str, *, where: str) -> None:
    """UserError unless the file or module exists and defines the function at its top level."""
    place, function = _split(name, where)
    source = _source_file(place, where)
    if source is None:  # compiled or generated: no source to read; resolve_reference reports errors
        return
    try:
        tree = ast.parse(read_source(source), str(source))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError("this file is not valid Python", where=f"{source}{line}", got=error) from error
    names = _top_level_names(tree)
    if function not in names and not _has_star_import(tree):
        close = difflib.get_close_matches(function, names, n=1)
        raise UserError(
            f"there is no function {function!r} in {place}",
            where=where,
            got=repr(name),
            allowed=", ".join(sorted(names)) or "nothing: the file defines no function",
            hint=f"did you mean {place}:{close[0]} ?" if close else None,
        )


def changed_globals(path: Path) -> list[str]:
    """Global variables that functions of a file assign (`global count`). Empty for a file that cannot be read."""
    try:
        tree = ast.parse(read_source(path))
    except (OSError, SyntaxError, ValueError):
        return []
    return sorted({name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names})


def resolve_reference(name: str, *, where: str) -> Callable[..., Any]:
    """Import the file or module and return the function."""
    place, function = _split(name, where)
    try:
        with local_modules_compiled(), process_kept():
            check_reference(name, where=where)
            with importing(_module_name(Path(place)) if _is_file(place) else place):
                module = _import_file(Path(place)) if _is_file(place) else importlib.import_module(place)
    except PacelineError:
        raise
    except Exception as error:
        raise UserError(
            f"importing {place} failed", where=where, got=f"{type(error).__name__}: {text_of(error)}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"{function!r} in {place} is not a function", where=where, got=type(found).__name__)
    result: Callable[..., Any] = found
    return result


def _split(name: str, where: str) -> tuple[str, str]:
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise UserError(
            "this does not name a function",
            where=where,
            got=repr(name),
            allowed="FILE.py:FUNCTION or package.module:FUNCTION",
        )
    return place, function


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _source_file(place: str, where: str) -> Path | None:
    if _is_file(place):
        path = Path(place)
        if not path.is_file():
            hint = "separate several functions with spaces, not commas" if "," in place else None
            raise UserError(
                "no such file", where=where, got=str(path.absolute()), allowed="FILE.py:FUNCTION", hint=hint
            )
        return path
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError) as error:  # a parent package is missing, or the name is malformed
        raise _no_module(place, where) from error
    if spec is None:
        raise _no_module(place, where)
    return Path(spec.origin) if spec.has_location and spec.origin and spec.origin.endswith(".py") else None


def _no_module(place: str, where: str) -> UserError:
    return UserError(
        f"there is no module {place!r}",
        where=where,
        got=repr(place),
        allowed="a module that Python can import, or a FILE.py",
        hint="install its package, or set PYTHONPATH to the folder that holds it",
    )


def _top_level_names(tree: ast.Module) -> set[str]:
    """Functions, classes, assigned and imported names: all of them may be callable."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _has_star_import(tree: ast.Module) -> bool:
    return any(isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names) for n in tree.body)


def _module_name(path: Path) -> str:
    return module_name_of("paceline_user", path, str(path.resolve()))


def _import_file(path: Path) -> ModuleType:
    """Import one file under a unique name. Its folder is not added to sys.path."""
    name = _module_name(path)
    loader = LocalLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    if spec is None or spec.loader is None:
        raise UserError("this file cannot be imported", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    spec.loader.exec_module(module)
    return module
