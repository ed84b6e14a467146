"""Turns function objects into names that ranks can import.

A rank is another process and imports what it needs. A function of a file becomes `FILE.py:FUNCTION`, a function of a
package becomes `package.module:FUNCTION`. A function of a notebook has no file. Its source, and the source of
everything in the notebook that it uses, is written to a file in the run folder (`write_down`): modules and imported
names become imports, functions and classes are written, numbers and texts become constants. Anything else (a tensor,
an open file) has no source and is refused with its name.
"""

from __future__ import annotations

import ast
import linecache
import symtable
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from paceline.errors import UserError

_HEADER = '"""Functions of a notebook, written for the ranks of this run."""\n'
_REMEDY = "put the function and what it needs into a FILE.py, and give 'FILE.py:FUNCTION'"


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


def write_down(functions: Iterable[Callable[..., Any]]) -> str:
    """The text of a file that defines these functions of `__main__`."""
    pieces = _Pieces(vars(sys.modules["__main__"]))
    for function in functions:
        pieces.need(function.__name__, needed_by="paceline.train")
    top = _HEADER + "\n" + "\n".join(sorted(set(pieces.imports)))
    return "\n\n\n".join([top, *pieces.definitions]) + "\n"


class _Pieces:
    """Collects definitions in the order of their dependencies."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._seen: set[str] = set()
        self.imports: list[str] = []
        self.definitions: list[str] = []

    def need(self, name: str, *, needed_by: str) -> None:
        if name in self._seen or name not in self._namespace:  # a builtin, or an unknown name that Python will report
            return
        self._seen.add(name)
        value = self._namespace[name]
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""))
        elif isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            source = _source_of(value)
            for used in _names_used(source):
                self.need(used, needed_by=name)
            self.definitions.append(source)
        elif _is_imported(value):
            imported = f"from {value.__module__} import {value.__qualname__}"
            self.imports.append(imported + (f" as {name}" if name != value.__qualname__ else ""))
        elif _is_constant(value):
            self.definitions.append(f"{name} = {value!r}")
        else:
            raise UserError(
                f"{name!r} of this notebook cannot be written to a file for the ranks",
                where=f"needed by {needed_by}",
                got=f"a {type(value).__name__}",
                allowed="imports, functions, classes, numbers and texts",
                hint=f"make it inside the function, or {_REMEDY}",
            )


def _is_imported(value: Any) -> bool:
    home, name = sys.modules.get(getattr(value, "__module__", None) or ""), getattr(value, "__qualname__", None)
    return home is not None and name is not None and getattr(home, name, None) is value


def _is_constant(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False


def _source_of(thing: FunctionType | type) -> str:
    """The source in its cell. Python finds the source of a function there, but of a class only through its methods."""
    members = vars(thing).values() if isinstance(thing, type) else [thing]
    files = [member.__code__.co_filename for member in members if isinstance(member, FunctionType)]
    lines = linecache.getlines(files[0]) if files else []
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in reversed(ast.parse("".join(lines)).body):
        if isinstance(node, kinds) and node.name == thing.__name__:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    raise UserError(f"the source of {thing.__name__} is not known here", got=repr(thing), hint=_REMEDY)


def _names_used(source: str) -> list[str]:
    """Names that are looked up outside of this piece of source."""
    top = symtable.symtable(source, "notebook", "exec")
    names: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
    return sorted(names)
