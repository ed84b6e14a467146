"""The user's own Python files: which of them a function needs, and the bytes of each that this process compiles.

An editor may save a file while a run starts. During a run each file is therefore read once: these bytes are compiled,
hashed, signed and stored. Bytecode beside a file is not used, because it may be of other code.

Local means: not part of Python, not below a site-packages folder, and not Paceline. Nothing here imports a module.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import paceline
from paceline.errors import UserError
from paceline.settings.small_files import read_small
from paceline.settings.syntax import CodeReference

_LARGEST_FILE_BYTES = 10_000_000
_GUARD = 'put what the file does below `if __name__ == "__main__":`, because Paceline imports it for its functions'
_imported_now: list[str] = []  # names of modules, of all threads
_kept: dict[Path, bytes] | None = None  # None: files are read again each time


# --- Reading and compiling


@contextmanager
def source_read_once() -> Iterator[None]:
    """In this block, each file of the user has the content that it has when it is first read."""
    global _kept  # of the whole process: other threads import, too
    before = _kept
    _kept = {} if before is None else before
    try:
        with local_modules_compiled():
            yield
    finally:
        _kept = before


@contextmanager
def local_modules_compiled() -> Iterator[None]:
    """In this block, local modules that are imported are compiled from their files, and the loader keeps the bytes."""
    if _FINDER in sys.meta_path:
        yield
        return
    sys.meta_path.insert(0, _FINDER)
    try:
        yield
    finally:
        sys.meta_path.remove(_FINDER)


def read_source(path: Path) -> bytes:
    """The content of a file of the user. Raises OSError or ValueError."""
    if _kept is None:
        return read_small(path, _LARGEST_FILE_BYTES)
    path = path.resolve()
    if path not in _kept:
        _kept[path] = read_small(path, _LARGEST_FILE_BYTES)
    return _kept[path]


def module_name_of(prefix: str, path: Path, place: str) -> str:
    """A name for the module of a file. Two files of one name are two modules. A dot would name a package."""
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
    stem = re.sub(r"\W", "_", path.stem)
    return f"{prefix}_{stem}_{digest}"


class LocalLoader(SourceFileLoader):
    """Compiles the file itself, and keeps the bytes that it has compiled."""

    source: bytes | None = None

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        self.source = read_source(Path(path))
        code: CodeType = self.source_to_code(self.source, path)
        return code


class _LocalFinder(MetaPathFinder):
    """Finds what the other finders find. Local modules get our loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                if type(spec.loader) is SourceFileLoader and spec.origin and is_local(Path(spec.origin)):
                    spec.loader = LocalLoader(spec.loader.name, spec.loader.path)
                return spec
        return None


_FINDER = _LocalFinder()


# --- Finding


@dataclass(frozen=True)
class UserModule:
    """A file that a function needs."""

    name: str  # of its import; empty for a FILE.py that the config names
    path: Path | None  # None: a folder without __init__.py, or a module that is not a file
    is_package: bool
    is_local: bool
    source: bytes

    @property
    def text(self) -> str:
        """Raises SyntaxError or ValueError for an unknown encoding."""
        return importlib.util.decode_source(self.source)

    def imports(self) -> tuple[str, ...]:
        """Names of modules that it imports, also inside of functions. Some of `from X import NAME` are no modules."""
        return _imports_of(self.source, self.name if self.is_package else self.name.rpartition(".")[0])


@functools.lru_cache(maxsize=10_000)  # a file is asked for several times: by each function, to sign, hash and store
def _imports_of(source: bytes, package: str) -> tuple[str, ...]:
    try:
        nodes = list(ast.walk(ast.parse(importlib.util.decode_source(source))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # Python cannot import it either
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:
                    continue
            names += [base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")]
    return tuple(dict.fromkeys(names))


def modules_needed(item: CodeReference, *, follows_imports: bool = True) -> list[UserModule]:
    """The file of a function (the packages around it first), then the local modules that it imports.

    Raises OSError or ValueError if the function's own file cannot be read.
    """
    found: dict[str, UserModule] = {}
    if item.is_file:
        path = item.path.resolve()
        found[""] = UserModule("", path, is_package=False, is_local=True, source=read_source(path))
    else:
        for name in _packages_and(item.place):
            spec = spec_of(name)
            if spec is None:
                break
            found[name] = _read(name, spec)
    waiting = list(found.values()) if follows_imports else []
    not_local: set[str] = set()
    while waiting:
        module = waiting.pop()
        for imported in module.imports() if module.is_local else ():
            for name in _packages_and(imported):
                if name in found:
                    continue
                helper = _read_local(name) if name not in not_local else None
                if helper is None:
                    not_local.add(name)
                    break
                found[name] = helper
                waiting.append(helper)
    return list(found.values())


def main_module(item: CodeReference, modules: list[UserModule]) -> UserModule | None:
    """The module among those needed that defines the function. None if it was not found."""
    name = "" if item.is_file else item.place
    return next((module for module in modules if module.name == name), None)


def spec_of(name: str) -> ModuleSpec | None:
    """How a module was imported, or would be. Does not import the packages around it."""
    spec: ModuleSpec | None = None
    for part in _packages_and(name):
        loaded = sys.modules.get(part)
        known = getattr(loaded, "__spec__", None)
        places = None if spec is None else _places(spec)
        try:
            if isinstance(known, ModuleSpec):
                spec = known
            elif "." not in part:
                spec = importlib.util.find_spec(part)
            else:
                spec = _find_below(part, places or [])
        except (ImportError, ValueError, AttributeError, OSError):
            return None
        if spec is None:
            return None
    return spec


def _places(spec: ModuleSpec) -> list[str]:
    """The folders of a package. A package may change them when it is imported."""
    loaded = getattr(sys.modules.get(spec.name), "__path__", None)
    return list(spec.submodule_search_locations or ()) if loaded is None else list(loaded)


def _find_below(name: str, places: list[str]) -> ModuleSpec | None:
    """A module in the folders of its package. `importlib.util.find_spec` would import the package."""
    folders: list[str] = []
    for place in places:
        importer = pkgutil.get_importer(place)
        spec = importer.find_spec(name) if importer is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        if spec is not None:
            folders += spec.submodule_search_locations or ()
    if not folders:
        return None
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = folders
    return found


def _packages_and(name: str) -> list[str]:
    """For a.b.c: a, a.b, a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _read(name: str, spec: ModuleSpec) -> UserModule:
    is_package = spec.submodule_search_locations is not None
    if not spec.has_location or spec.origin is None:
        places = _places(spec)
        is_folder = is_package and bool(places) and all(is_local(Path(place)) for place in places)
        return UserModule(name, None, is_package, is_folder, b"")
    path = Path(spec.origin)
    is_own = spec.origin.endswith(".py") and is_local(path)
    return UserModule(name, path.resolve(), is_package, is_own, _content(spec, path))


def _read_local(name: str) -> UserModule | None:
    """None for a module that is not local, or that cannot be found or read."""
    spec = spec_of(name)
    if spec is None:
        return None
    if spec.has_location and not (spec.origin or "").endswith(".py"):
        return None
    if spec.has_location and not is_local(Path(spec.origin or "")):
        return None
    try:
        module = _read(name, spec)
        return module if module.is_local and module.text is not None else None
    except (OSError, ValueError, SyntaxError):
        return None


def _content(spec: ModuleSpec, path: Path) -> bytes:
    """The bytes that were compiled, if our loader has done it, else those of the file."""
    if isinstance(spec.loader, LocalLoader) and spec.loader.source is not None:
        return spec.loader.source
    try:
        return read_source(path)
    except NotADirectoryError:  # in a zip file
        get_source = getattr(spec.loader, "get_source", None)
        text = get_source(spec.name) if get_source is not None else None
        if not isinstance(text, str):
            raise
        return text.encode()


@functools.cache
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*sorted(roots), Path(paceline.__file__).resolve().parent)


@functools.lru_cache(maxsize=10_000)
def is_local(path: Path) -> bool:
    resolved = path.resolve()
    if {"site-packages", "dist-packages"} & set(resolved.parts):
        return False
    return not any(resolved.is_relative_to(root) for root in _installed_roots())


@contextmanager
def process_kept() -> Iterator[None]:
    """Restore the working folder: relative paths of the run are read again later.

    Restore standard output and error too if they can no longer be written to, such as None. A stream that the user's
    code has put in their place stays.
    """
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    with chdir("."):
        try:
            yield
        finally:
            for name, before in streams.items():
                now = getattr(sys, name, None)
                if not (callable(getattr(now, "write", None)) and callable(getattr(now, "flush", None))):
                    setattr(sys, name, before)


@contextmanager
def importing(module_name: str) -> Iterator[None]:
    """A module of the user is imported in this block. It may not ask for itself again: that would never end."""
    refuse_while_importing("this file uses a run that needs the file itself", only=module_name)
    _imported_now.append(module_name)
    try:
        yield
    finally:
        _imported_now.remove(module_name)


def refuse_while_importing(what: str, *, only: str = "") -> None:
    """UserError if a module of the user that is being imported has called this, also from a thread of its own.

    The callers are compared by the names of their modules: a script that runs as `__main__` may be imported meanwhile.
    """
    names = {only} & {*_imported_now} if only else {*_imported_now}
    frame: FrameType | None = sys._getframe() if names else None
    while frame is not None:
        if frame.f_globals.get("__name__") in names:
            raise UserError(what, where=f"{frame.f_code.co_filename}, line {frame.f_lineno}", hint=_GUARD)
        frame = frame.f_back
