"""Turns function objects into names that ranks can import.

A rank is another process and imports what it needs. A function of a file becomes `FILE.py:FUNCTION`, a function of a
package becomes `package.module:FUNCTION`. Other functions have no such name: those of a notebook, nested functions,
lambdas, `functools.partial` and instances of nn.Module. Their source, and the source of everything that they use, is
written to a file in the run folder (`write_down`): modules and imported names become imports, functions and classes
are written, numbers and texts become constants. Anything else (a tensor, an open file) has no source and is refused
with its name.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from paceline.errors import UserError
from paceline.library.modules import constructor_arguments, is_module

_HEADER = '"""Functions of the caller that ranks cannot import, written for the ranks of this run."""\n'
_REMEDY = "put the function and what it needs into a FILE.py, and give 'FILE.py:FUNCTION'"
_LAMBDA = "<lambda>"
_Node = ast.FunctionDef | ast.ClassDef | ast.Lambda


def reference_to(function: Callable[..., Any], *, source_file: Path) -> str:
    """`source_file` is the file to which functions without a name of their own will be written."""
    module = _home_of(function)
    if module is None:
        return f"{source_file}:{name_of(function)}"
    spec, name = module.__spec__, name_of(function)
    if spec is not None and ("." in spec.name or getattr(module, "__file__", None) is None):
        return f"{spec.name}:{name}"  # a single file of a package could not import its siblings
    return f"{Path(str(module.__file__)).absolute()}:{name}"


def is_importable(function: Callable[..., Any]) -> bool:
    """Whether ranks can import the function by its name, from a file or a module."""
    return _home_of(function) is not None


def name_of(function: Any) -> str:
    """The name under which ranks find the function."""
    if isinstance(function, functools.partial):
        return f"{name_of(function.func)}_partial"
    if is_module(function):
        return f"build_{type(function).__name__}"
    name = str(getattr(function, "__name__", ""))
    return "from_lambda" if name == _LAMBDA else name


def _home_of(function: Any) -> ModuleType | None:
    """The module from which ranks can import the function. None if there is no such module."""
    name = str(getattr(function, "__qualname__", ""))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not function:
        return None
    is_notebook = module.__name__ == "__main__" and getattr(module, "__file__", None) is None
    return None if is_notebook else module


def write_down(functions: Iterable[Callable[..., Any]]) -> str:
    """The text of a file that defines these functions."""
    pieces = _Pieces()
    for function in functions:
        pieces.need(name_of(function), function, needed_by="paceline.train")
    top = _HEADER + "\n" + "\n".join(sorted(set(pieces.imports)))
    return "\n\n\n".join([top, *pieces.definitions]) + "\n"


class _Pieces:
    """Collects definitions in the order of their dependencies."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}
        self.imports: list[str] = []
        self.definitions: list[str] = []

    def need(self, name: str, value: Any, *, needed_by: str) -> None:
        """Define or import `value` under this name."""
        if name in self._seen:
            if self._seen[name] is not value and not (_is_constant(value) and self._seen[name] == value):
                raise _refusal(name, "two values of this name", needed_by)
            return
        self._seen[name] = value
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""))
        elif isinstance(value, FunctionType | type) and not _is_imported(value):
            self._write(name, value)
        elif is_module(value) and needed_by != "paceline.train":
            raise _refusal(name, f"a {type(value).__name__}, whose weights would be lost", needed_by)
        elif is_module(value):
            self.definitions.append(f"def {name}():\n    return {self._express(value, name, needed_by)}")
        elif _is_imported(value):
            imported = f"from {value.__module__} import {value.__qualname__}"
            self.imports.append(imported + (f" as {name}" if name != value.__qualname__ else ""))
        else:
            self.definitions.append(f"{name} = {self._express(value, name, needed_by)}")

    def _write(self, name: str, value: FunctionType | type) -> None:
        """Write a function or class, after everything that it uses."""
        source = _source_of(value)
        scope = _scope_of(value)
        for used in _names_used(source):
            if used in scope:  # otherwise a builtin, or an unknown name that Python will report
                self.need(used, scope[used], needed_by=name)
        if value.__name__ == _LAMBDA:
            self.definitions.append(f"{name} = {source}")
        elif value.__name__ == name:
            self.definitions.append(source)
        else:
            self.need(value.__name__, value, needed_by=name)
            self.definitions.append(f"{name} = {value.__name__}")

    def _express(self, value: Any, name: str, needed_by: str) -> str:
        """An expression that gives this value."""
        if isinstance(value, functools.partial):
            self.imports.append("import functools")
            return self._call("functools.partial", [value.func, *value.args], value.keywords, name, needed_by)
        if is_module(value):
            kind, arguments, keywords = constructor_arguments(value)
            return self._call(self._express(kind, name, needed_by), arguments, keywords, name, needed_by)
        if isinstance(value, collections.OrderedDict):
            self.imports.append("import collections")
            return f"collections.OrderedDict({self._express(list(value.items()), name, needed_by)})"
        if isinstance(value, FunctionType | type) or _is_imported(value):
            self.need(name_of(value), value, needed_by=needed_by)
            return name_of(value)
        if _is_constant(value):
            return repr(value)
        if isinstance(value, tuple | list):
            items = "".join(f"{self._express(item, name, needed_by)}, " for item in value)
            return f"({items})" if isinstance(value, tuple) else f"[{items}]"
        if type(value) is dict:
            pairs = (
                (self._express(key, name, needed_by), self._express(item, name, needed_by))
                for key, item in value.items()
            )
            return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
        raise _refusal(name, f"a {type(value).__name__}", needed_by)

    def _call(self, function: str, arguments: list[Any], keywords: dict[str, Any], name: str, needed_by: str) -> str:
        given = [self._express(value, name, needed_by) for value in arguments]
        given += [f"{key}={self._express(value, name, needed_by)}" for key, value in keywords.items()]
        return f"{function}({', '.join(given)})"


def _refusal(name: str, got: str, needed_by: str) -> UserError:
    return UserError(
        f"{name!r} cannot be written to a file for the ranks",
        where=f"needed by {needed_by}",
        got=got,
        allowed="imports, functions, classes, numbers and texts",
        hint=f"make it inside the function, or {_REMEDY}",
    )


def _is_imported(value: Any) -> bool:
    """Whether another file can import it. A script is `__main__` only in its own process."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", None)
    home = sys.modules.get(module)
    return module != "__main__" and home is not None and name is not None and getattr(home, name, None) is value


def _is_constant(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RuntimeError):  # RuntimeError: the truth of a tensor
        return False


def _scope_of(thing: FunctionType | type) -> dict[str, Any]:
    """The names that its source can use: those around it and the global ones."""
    members = _functions_of(thing)
    scope: dict[str, Any] = dict(vars(sys.modules[thing.__module__])) if thing.__module__ in sys.modules else {}
    for member in members:
        scope |= member.__globals__
    for member in members:
        for name, cell in zip(member.__code__.co_freevars, member.__closure__ or (), strict=True):
            try:
                scope[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    return scope


def _functions_of(thing: FunctionType | type) -> list[FunctionType]:
    """The function, without the wrappers of decorators, or the methods that are written in the class."""
    members = [thing] if isinstance(thing, FunctionType) else vars(thing).values()
    plain = [inspect.unwrap(member) for member in members if isinstance(member, FunctionType)]
    # Methods that a decorator has made, such as those of a dataclass, have no lines.
    return [function for function in plain if linecache.getlines(function.__code__.co_filename)]


def _source_of(thing: FunctionType | type) -> str:
    """The source in its file or cell. Python knows the lines of a function, but of a class only through its methods."""
    functions = _functions_of(thing)
    lines = linecache.getlines(functions[0].__code__.co_filename) if functions else []
    found = []
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # the file has changed since
        tree = ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, _Node) and _is_source_of(node, thing, functions[0].__code__.co_firstlineno):
            found.append(node)
    if len(found) != 1:
        got = "several lambdas in one line" if found else repr(thing)
        raise UserError(f"the source of {thing.__name__} is not known here", got=got, hint=_REMEDY)
    if isinstance(found[0], ast.Lambda):
        return "(" + str(ast.get_source_segment("".join(lines), found[0])) + ")"
    return textwrap.dedent("".join(lines[_first_line(found[0]) - 1 : found[0].end_lineno])).rstrip()


def _is_source_of(node: _Node, thing: FunctionType | type, first_line: int) -> bool:
    """`first_line`: of the function, or of the first method of the class."""
    if isinstance(node, ast.Lambda):
        return thing.__name__ == _LAMBDA and node.lineno == first_line
    if node.name != thing.__name__ or isinstance(node, ast.ClassDef) != isinstance(thing, type):
        return False
    if isinstance(node, ast.FunctionDef):
        return _first_line(node) == first_line
    return any(isinstance(inner, ast.FunctionDef) and _first_line(inner) == first_line for inner in node.body)


def _first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _names_used(source: str) -> list[str]:
    """Names that are looked up outside of this piece of source."""
    top = symtable.symtable(source, "functions", "exec")
    names: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
    return sorted(names)
