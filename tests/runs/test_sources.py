"""The stored source of a user's functions: which files are collected, and that it works without the files."""

from __future__ import annotations

import inspect
import shutil
import sys
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.runs import sources as sources_module
from paceline.runs.sources import Sources, SourcesTooLarge, collect_sources
from paceline.settings.syntax import CodeReference

FILE = """\
import json
import torch
import stored_module
from stored_package import part
import stored_folder.inner


class Net:
    def __init__(self, width=3):
        self.width = width + part.ONE + stored_folder.inner.TWO
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, a module, a package with relative imports and a folder without __init__.py, all importable."""
    (tmp_path / "stored_package").mkdir()
    (tmp_path / "stored_folder").mkdir()
    (tmp_path / "stored_file.py").write_text(FILE)
    (tmp_path / "stored_module.py").write_text("from stored_package.part import *\n")
    (tmp_path / "stored_package" / "__init__.py").write_text("NAME = 'package'\n")
    (tmp_path / "stored_package" / "part.py").write_text("from . import NAME\nfrom .deep import ONE\n")
    (tmp_path / "stored_package" / "deep.py").write_text("ONE = 1\n")
    (tmp_path / "stored_package" / "unused.py").write_text("")
    (tmp_path / "stored_folder" / "inner.py").write_text("TWO = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def collected(home: Path) -> Sources:
    """The state after the imports of a training."""
    import importlib

    importlib.import_module("stored_file")
    found = collect_sources([CodeReference("model_name", str(home / "stored_file.py"), "Net")])
    for name in [name for name in sys.modules if name.startswith("stored_")]:
        del sys.modules[name]
    return found


def test_local_modules_are_stored_and_installed_ones_are_not(collected: Sources) -> None:
    names = {name for name in collected.modules if not name.startswith("paceline_stored_")}
    package = {"stored_package", "stored_package.part", "stored_package.deep"}
    assert names == {"stored_module", "stored_folder", "stored_folder.inner", *package}
    assert len(collected.modules) == len(names) + 1


def test_stored_source_works_without_the_files(collected: Sources, home: Path) -> None:
    """Also a class, whose parameters are still readable. Afterwards sys.modules has none of it."""
    again = Sources.from_json(collected.to_json())
    assert again == collected
    assert again.sha256 == collected.sha256
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = set(sys.modules)
    build = again.resolve(f"{home}/stored_file.py:Net", where="the test")
    assert list(inspect.signature(build).parameters) == ["width"]
    assert build(width=4).width == 7
    assert build().width == 6
    assert type(build()) is type(build())
    assert not {name for name in set(sys.modules) - before if "stored_" in name}


def test_the_text_is_part_of_the_hash(collected: Sources) -> None:
    values = collected.to_json()
    values["modules"]["stored_package.deep"]["text"] = "ONE = 2\n"
    assert Sources.from_json(values).sha256 != collected.sha256


def test_only_functions_of_the_record_are_found(collected: Sources) -> None:
    """A forged config cannot name a function of an installed package."""
    with pytest.raises(UserError):
        collected.resolve("os:abort", where="the test")


def test_a_missing_package_is_named(home: Path) -> None:
    (home / "stored_file.py").write_text("import no_such_package_here\n\n\ndef build(): ...\n")
    found = collect_sources([CodeReference("model_name", str(home / "stored_file.py"), "build")])
    with pytest.raises(UserError) as raised:
        found.resolve(f"{home}/stored_file.py:build", where="the test")
    assert raised.value.hint == "pip install no_such_package_here"


def test_source_that_is_too_large_is_not_followed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "LARGEST_SOURCES_BYTES", 50)
    references = [CodeReference("model_name", str(home / "stored_file.py"), "Net")]
    with pytest.raises(SourcesTooLarge):
        collect_sources(references)
    assert len(collect_sources(references, follows_imports=False).modules) == 1


@pytest.mark.parametrize(
    "values",
    [None, {}, {"functions": {"a": ["b"]}, "modules": {}}, {"functions": {}, "modules": {"a": {"text": 1}}}],
)
def test_forged_values_are_refused(values: object) -> None:
    with pytest.raises(ValueError):
        Sources.from_json(values)


@pytest.mark.parametrize("file", ["net.v2.py", "my net.py", "1-2.py", "é.py"])
def test_a_file_of_any_name_can_be_stored(file: str, tmp_path: Path) -> None:
    """The name of a file may have dots and spaces. The name of a module may not."""
    (tmp_path / file).write_text("def build():\n    return 7\n")
    reference = CodeReference("model_name", str(tmp_path / file), "build")
    stored = Sources.from_json(collect_sources([reference]).to_json())
    assert stored.resolve(str(reference), where="the test")() == 7
