"""The source of the user's functions, stored with a run. The run can then be used without the files.

Stored are the file of each function and the local modules that it imports, directly or through other local modules.
Local means: not part of Python, not below a site-packages folder, and not Paceline. Limits: an installed package is not
stored, only its name; nor are modules that are imported by a computed name, compiled modules, and data files beside the
source. A stored module has no `__file__`. Modules are found among those that are imported when training starts, and a
module that `forward` imports must be installed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import paceline
from paceline.errors import UserError, text_of
from paceline.runs.json_files import Fields, ListOf, MapOf, fit
from paceline.runs.user_code import process_kept
from paceline.settings.code import CodeReference
from paceline.settings.small_files import read_small

LARGEST_SOURCES_BYTES = 2_000_000  # of all modules together; a part of every checkpoint
_LARGEST_FILE_BYTES = 10_000_000
_SHAPE = Fields(
    required={
        "functions": MapOf(ListOf(str)),
        "modules": MapOf(Fields(required={"text": str, "file": str, "is_package": bool})),
    }
)
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
            with process_kept(), self.importable():
                function = getattr(importlib.import_module(module_name), function_name)
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

    @functools.cached_property
    def _finder(self) -> _Finder:
        return _Finder(self.modules)


def _hint(error: Exception) -> str | None:
    return f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) and error.name else None


class _Finder(MetaPathFinder):
    """Finds stored modules."""

    def __init__(self, modules: dict[str, StoredModule]) -> None:
        self._modules = modules
        self.imported: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is None:
            return None
        loader = _Loader(module)
        return ModuleSpec(fullname, loader, origin=loader.origin, is_package=module.is_package)


class _Loader(InspectLoader):
    """Executes the stored text. Tracebacks show its lines."""

    def __init__(self, module: StoredModule) -> None:
        self._module = module
        self.origin = f"stored:{module.file}"

    def is_package(self, fullname: str) -> bool:
        return self._module.is_package

    def get_source(self, fullname: str) -> str:
        return self._module.text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._module.text, self.origin, "exec", dont_inherit=True)


# --- Collecting


class SourcesTooLarge(Exception):
    """The source of a run's functions is too large to be stored with the run."""

    def __init__(self, names: str, size_bytes: int) -> None:
        super().__init__(f"{size_bytes:,} bytes of {LARGEST_SOURCES_BYTES:,}; install the larger part as a package")
        self.names = names


def collect_sources(references: list[CodeReference], *, follows_imports: bool = True) -> Sources:
    """Read the source of these functions, as it is now, and of the local modules that they import."""
    functions: dict[str, tuple[str, str]] = {}
    modules: dict[str, StoredModule] = {}
    for item in references:
        name = item.place
        if item.is_file:
            name = f"paceline_stored_{item.path.stem}_{hashlib.sha256(item.place.encode()).hexdigest()[:8]}"
            _add(name, item.path.resolve(), modules, is_package=False, follows_imports=follows_imports)
        elif follows_imports:
            _add_by_name(name, modules)
        functions[str(item)] = (name, item.function)
    size_bytes = sum(len(module.text.encode()) for module in modules.values())
    if size_bytes > LARGEST_SOURCES_BYTES and follows_imports:
        raise SourcesTooLarge(", ".join(functions), size_bytes)
    return Sources(functions, modules)


def _add_by_name(name: str, modules: dict[str, StoredModule]) -> None:
    """Store a local module and the packages around it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        whole = ".".join(parts[:count])
        if whole in modules:
            continue
        spec = _spec_of(whole)
        if spec is None:
            return
        is_package = spec.submodule_search_locations is not None
        if spec.origin is None and is_package:  # a folder without __init__.py
            if all(_is_local(Path(place)) for place in spec.submodule_search_locations or ()):
                modules[whole] = StoredModule("", whole.replace(".", "/"), is_package=True)
        elif spec.origin is not None and spec.origin.endswith(".py") and _is_local(Path(spec.origin)):
            _add(whole, Path(spec.origin), modules, is_package=is_package)


def _add(
    name: str, path: Path, modules: dict[str, StoredModule], *, is_package: bool, follows_imports: bool = True
) -> None:
    text = importlib.util.decode_source(read_small(path, _LARGEST_FILE_BYTES))
    modules[name] = StoredModule(text, path.name, is_package)
    package = name if is_package else name.rpartition(".")[0]
    for imported in _imports_of(text, package) if follows_imports else ():
        _add_by_name(imported, modules)


def _imports_of(text: str, package: str) -> list[str]:
    """Names of modules that a text imports, also inside of functions. Some of `from X import NAME` are no modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                with suppress(ImportError):
                    base = importlib.util.resolve_name("." * node.level + base, package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")]
    return list(dict.fromkeys(name for name in names if name and not name.startswith(".")))


def _spec_of(name: str) -> ModuleSpec | None:
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__spec__", None) is not None:
        return loaded.__spec__
    parent = name.rpartition(".")[0]
    if parent and not hasattr(sys.modules.get(parent), "__path__"):
        return None  # the package was not imported, or NAME of `from X import NAME` is no module
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


@functools.cache
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*sorted(roots), Path(paceline.__file__).resolve().parent)


def _is_local(path: Path) -> bool:
    resolved = path.resolve()
    if {"site-packages", "dist-packages"} & set(resolved.parts):
        return False
    return not any(resolved.is_relative_to(root) for root in _installed_roots())
