"""The source of the user's functions, stored with a run. The run can then be used without the files.

Stored are the file of each function and the local modules that it imports, directly or through other local modules,
also inside of functions (runs/local_code.py). Limits: an installed package is not stored, only its name; nor are
modules that are imported by a computed name, compiled modules, and data files beside the source. A stored module has no
`__file__`.

Stored code finds the stored modules whenever it executes an import statement, also in `forward`. Other code does not
find them, except inside of `Sources.importable`.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from paceline.errors import PacelineError, UserError, text_of
from paceline.runs.json_files import Fields, ListOf, MapOf, fit
from paceline.runs.local_code import importing, module_name_of, modules_needed, process_kept
from paceline.settings.syntax import CodeReference

LARGEST_SOURCES_BYTES = 2_000_000  # of all modules together; a part of every checkpoint
_SHAPE = Fields(
    required={
        "functions": MapOf(ListOf(str)),
        "modules": MapOf(Fields(required={"text": str, "file": str, "is_package": bool})),
    }
)
ORIGIN = "stored:"  # begins the file name of stored code in a traceback
_lock = threading.RLock()  # sys.modules belongs to the whole process


@dataclass(frozen=True)
class StoredModule:
    """One module: its text, and the name of its file for messages."""

    text: str
    file: str
    is_package: bool


@dataclass(frozen=True)
class Sources:
    """The user's functions that a run names, with the modules they need."""

    functions: dict[str, tuple[str, str]] = field(default_factory=dict)  # as the config names it: module, function
    modules: dict[str, StoredModule] = field(default_factory=dict)  # by import name; installed ones are not here

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "functions": {name: list(pair) for name, pair in self.functions.items()},
            "modules": {name: asdict(module) for name, module in self.modules.items()},
        }

    @classmethod
    def from_json(cls, values: Any) -> Sources:
        """Raises ValueError for values that no run has saved."""
        values = fit(values, _SHAPE)
        if any(len(pair) != 2 for pair in values["functions"].values()):
            raise ValueError("a function without a module")
        if values["modules"] and not values["functions"]:
            raise ValueError("stored modules without a function")
        functions = {name: (module, function) for name, (module, function) in values["functions"].items()}
        modules = {
            name: StoredModule(entry["text"], entry["file"], entry["is_package"])
            for name, entry in values["modules"].items()
        }
        return cls(functions, modules)

    def resolve(self, name: str, *, where: str) -> Callable[..., Any]:
        """The function that the config names, from the stored source or from an installed package."""
        if name not in self.functions:
            raise UserError("the source of this function is not stored with the run", where=where, got=name)
        module_name, function_name = self.functions[name]
        try:
            with importing(module_name), process_kept(), self.importable():
                function = getattr(importlib.import_module(module_name), function_name)
        except PacelineError:
            raise
        except Exception as error:  # whatever the user's code raises
            got = f"{type(error).__name__}: {text_of(error)}"
            raise UserError(f"importing {name} failed", where=where, got=got, hint=_hint(error)) from error

        @functools.wraps(function, updated=())  # it may be a class, whose members are not the wrapper's
        def call(*arguments: Any, **options: Any) -> Any:
            with process_kept(), self.importable():  # it may import when it is called
                return function(*arguments, **options)

        return call

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Import the stored modules under their names. Modules of the caller with these names are set aside."""
        with _lock:
            if self._finder in sys.meta_path:  # a stored function calls another one
                yield
                return
            aside = {name: sys.modules.pop(name) for name in self.modules if name in sys.modules}
            sys.modules.update(self._finder.imported)
            sys.meta_path.insert(0, self._finder)
            try:
                yield
            finally:
                sys.meta_path.remove(self._finder)
                found = {name: sys.modules.pop(name) for name in self.modules if name in sys.modules}
                self._finder.imported.update(found)
                sys.modules.update(aside)

    def import_stored(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """`__import__` of stored code."""
        if level == 0 and name.partition(".")[0] not in self.modules:
            return builtins.__import__(name, globals, locals, fromlist, level)
        with self.importable():
            return builtins.__import__(name, globals, locals, fromlist, level)

    @functools.cached_property
    def _finder(self) -> _Finder:
        return _Finder(self)


def _hint(error: Exception) -> str | None:
    return f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) and error.name else None


class _Finder(MetaPathFinder):
    """Finds stored modules."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.imported: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._sources.modules.get(fullname)
        if module is None:
            return None
        loader = _Loader(module, self._sources)
        return ModuleSpec(fullname, loader, origin=loader.origin, is_package=module.is_package)


class _Loader(InspectLoader):
    """Executes the stored text. Tracebacks show its lines."""

    def __init__(self, module: StoredModule, sources: Sources) -> None:
        self._module = module
        self._sources = sources
        self.origin = f"{ORIGIN}{module.file}"

    def is_package(self, fullname: str) -> bool:
        return self._module.is_package

    def get_source(self, fullname: str) -> str:
        return self._module.text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._module.text, self.origin, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        # An import statement calls the `__import__` of its module's built-in names, whenever it is executed.
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._sources.import_stored}
        exec(self.get_code(module.__name__), vars(module))


# --- Collecting


class SourcesTooLarge(Exception):
    """The source of a run's functions is too large to be stored with the run."""

    def __init__(self, names: str, size_bytes: int) -> None:
        super().__init__(f"{size_bytes:,} bytes of {LARGEST_SOURCES_BYTES:,}; install the larger part as a package")
        self.names = names


def collect_sources(references: list[CodeReference], *, follows_imports: bool = True) -> Sources:
    """The source of these functions and of the local modules that they import, as it was compiled."""
    functions: dict[str, tuple[str, str]] = {}
    modules: dict[str, StoredModule] = {}
    for item in references:
        own_name = module_name_of("paceline_stored", item.path, item.place) if item.is_file else item.place
        for module in modules_needed(item, follows_imports=follows_imports):
            if module.is_local and (follows_imports or item.is_file):
                name = module.name or own_name
                file = module.path.name if module.path is not None else name.replace(".", "/")
                modules[name] = StoredModule(module.text, file, module.is_package)
        functions[str(item)] = (own_name, item.function)
    size_bytes = sum(len(module.text.encode()) for module in modules.values())
    if size_bytes > LARGEST_SOURCES_BYTES and follows_imports:
        raise SourcesTooLarge(", ".join(functions), size_bytes)
    return Sources(functions, modules)
