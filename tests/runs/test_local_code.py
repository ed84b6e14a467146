"""The user's files: each is read once in a run. The same text is compiled, stored, hashed and signed."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.data.reference import resolve_reference
from paceline.runs.local_code import modules_needed, source_read_once
from paceline.runs.sources import collect_sources
from paceline.runs.trust import hash_code
from paceline.settings.load import load_config
from paceline.settings.syntax import CodeReference

FILE = "import lc_helper\nfrom lc_package.part import VALUE\n\n\ndef build():\n    return lc_helper.ONE + VALUE\n"
LAZY = "def build():\n    import lc_package.part\n\n    return lc_package.part.VALUE\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file, a module and a package, all importable."""
    (tmp_path / "lc_package").mkdir()
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "lc_helper.py").write_text("ONE = 1\n")
    (tmp_path / "lc_package" / "__init__.py").write_text("")
    (tmp_path / "lc_package" / "part.py").write_text("VALUE = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("lc_")]:
        del sys.modules[name]


def reference(home: Path) -> CodeReference:
    return CodeReference("model_name", str(home / "own.py"), "build")


def stored(home: Path) -> dict[str, str]:
    """The stored texts by file name."""
    return {module.file: module.text for module in collect_sources([reference(home)]).modules.values()}


def code_hash(home: Path) -> str:
    (digest,) = hash_code(load_config("shapes-cnn", [f"--model-name={home}/own.py:build"]).config).values()
    return digest


def test_a_file_that_is_saved_after_its_import_is_stored_as_it_was_compiled(home: Path) -> None:
    """The file of the function, a module that it imports, and one of a package. The hash stays the same."""
    before = code_hash(home)
    with source_read_once():
        build = resolve_reference(f"{home}/own.py:build", where="the test")
        (home / "own.py").write_text(FILE + "# saved again\n")
        (home / "lc_helper.py").write_text("ONE = 100\n")
        (home / "lc_package" / "part.py").write_text("VALUE = 200\n")
        texts, during = stored(home), code_hash(home)
        again = resolve_reference(f"{home}/own.py:build", where="the test")
    assert texts["own.py"] == FILE
    assert texts["lc_helper.py"] == "ONE = 1\n"
    assert texts["part.py"] == "VALUE = 2\n"
    assert during == before
    assert (build(), again()) == (3, 3)
    assert code_hash(home) != before, "after the run the files are read again"


def test_a_module_that_is_imported_later_is_the_stored_one(home: Path) -> None:
    """An import inside a function, of a package that was not imported before. The file is not read again."""
    (home / "own.py").write_text(LAZY)
    with source_read_once():
        build = resolve_reference(f"{home}/own.py:build", where="the test")
        assert "lc_package" not in sys.modules
        assert stored(home)["part.py"] == "VALUE = 2\n"
        assert "lc_package" not in sys.modules, "collecting imports nothing"
        (home / "lc_package" / "part.py").write_text("VALUE = 200\n")
        assert build() == 2


def test_bytecode_of_a_helper_is_not_executed(home: Path) -> None:
    """A .pyc file with other code, and the right time and size, is next to a module that the user's file imports."""
    import importlib._bootstrap_external as bootstrap

    helper = home / "lc_helper.py"
    about = helper.stat()
    other = compile("ONE = 100", str(helper), "exec")
    data = bootstrap._code_to_timestamp_pyc(other, int(about.st_mtime), about.st_size)  # type: ignore[attr-defined]
    cached = Path(importlib.util.cache_from_source(str(helper)))
    cached.parent.mkdir()
    cached.write_bytes(data)
    assert resolve_reference(f"{home}/own.py:build", where="the test")() == 3


def test_a_changed_helper_changes_the_hash(home: Path) -> None:
    """A resume warns about it."""
    before = code_hash(home)
    (home / "lc_helper.py").write_text("ONE = 100\n")
    assert code_hash(home) != before
    (home / "own.py").write_text("def build(): ...\n")
    assert code_hash(home) == hashlib.sha256(b"def build(): ...\n").hexdigest(), "as in checkpoints of older versions"


def test_packages_without_init_are_followed(home: Path) -> None:
    """Nested folders, not imported."""
    (home / "lc_outer" / "inner").mkdir(parents=True)
    (home / "lc_outer" / "inner" / "deep.py").write_text("from . import beside\n")
    (home / "lc_outer" / "inner" / "beside.py").write_text("")
    found = modules_needed(CodeReference("loss", "lc_outer.inner.deep", "f"))
    names = ["lc_outer", "lc_outer.inner", "lc_outer.inner.deep", "lc_outer.inner.beside"]
    assert [module.name for module in found] == names
    assert "lc_outer" not in sys.modules


def test_modules_in_a_zip_file_are_stored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(home / "code.zip", "w") as archive:
        archive.writestr("lc_zipped.py", "TEN = 10\n")
    monkeypatch.syspath_prepend(str(home / "code.zip"))
    (home / "own.py").write_text("from lc_zipped import TEN\n\n\ndef build():\n    return TEN\n")
    with source_read_once():
        assert resolve_reference(f"{home}/own.py:build", where="the test")() == 10
        assert stored(home)["lc_zipped.py"] == "TEN = 10\n"


@pytest.mark.parametrize("text", ["def f(:\n", "\0", "# coding: no-such\n", "x = " + "(" * 9999, "from ... import a\n"])
def test_a_file_that_python_cannot_read_has_no_imports(home: Path, text: str) -> None:
    (home / "own.py").write_text(text)
    assert [module.name for module in modules_needed(reference(home))] == [""]


def test_the_finder_is_removed_after_the_run(home: Path) -> None:
    finders = list(sys.meta_path)
    with source_read_once(), source_read_once():
        assert len(sys.meta_path) == len(finders) + 1
    assert sys.meta_path == finders
