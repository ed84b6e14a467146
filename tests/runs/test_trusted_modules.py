"""`package.module:FUNCTION` in a run's config: every file that it would execute must be the user's."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.runs.trust import require_trusted_run, sign_code
from paceline.settings.load import load_config, to_yaml

MODULE = "from tm_package import NAME\nfrom . import beside\nimport tm_helper\n\n\ndef build(): ...\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder with an importable package."""
    monkeypatch.setenv("PACELINE_STATE", str(tmp_path / "state"))
    (tmp_path / "run" / "tm_package" / "inner").mkdir(parents=True)
    write_code(tmp_path / "run")
    monkeypatch.syspath_prepend(str(tmp_path / "run"))
    yield tmp_path / "run"
    for name in [name for name in sys.modules if name.startswith("tm_")]:
        del sys.modules[name]


def write_code(folder: Path) -> None:
    (folder / "tm_package" / "__init__.py").write_text("NAME = 1\n")
    (folder / "tm_package" / "inner" / "__init__.py").write_text("")
    (folder / "tm_package" / "inner" / "module.py").write_text(MODULE)
    (folder / "tm_package" / "inner" / "beside.py").write_text("")
    (folder / "tm_package" / "inner" / "unused.py").write_text("")
    (folder / "tm_helper.py").write_text("")


def sign(run: Path, reference: str) -> None:
    config = load_config("shapes-cnn", [f"--model-name={reference}"]).config
    (run / "config.yaml").write_text(to_yaml(config))
    assert sign_code(run, config) == ""
    require_trusted_run(run)


FILES = [
    *("tm_package/__init__.py", "tm_package/inner/__init__.py", "tm_package/inner/module.py"),
    *("tm_package/inner/beside.py", "tm_helper.py"),
]


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_of_a_package_is_refused(run: Path, file: str) -> None:
    """The module, every __init__.py of its packages, and their imports. The check imports nothing."""
    sign(run, "tm_package.inner.module:build")
    (run / file).write_text((run / file).read_text() + "# changed\n")
    with pytest.raises(UserError) as refused:
        require_trusted_run(run)
    assert str(run / file) in str(refused.value.got) or file.endswith("module.py")
    assert not [name for name in sys.modules if name.startswith("tm_")]


def test_a_file_that_is_not_imported_may_change(run: Path) -> None:
    sign(run, "tm_package.inner.module:build")
    (run / "tm_package" / "inner" / "unused.py").write_text("x = 1\n")
    require_trusted_run(run)


@pytest.mark.parametrize("file", ["tm_package/inner/module.py", "tm_package/inner/beside.py"])
def test_packages_without_init_are_checked_too(run: Path, file: str) -> None:
    (run / "tm_package" / "__init__.py").unlink()
    (run / "tm_package" / "inner" / "__init__.py").unlink()
    sign(run, "tm_package.inner.module:build")
    (run / file).write_text((run / file).read_text() + "# changed\n")
    with pytest.raises(UserError):
        require_trusted_run(run)


def test_a_new_init_is_refused(run: Path) -> None:
    """It would be executed before the unchanged module."""
    (run / "tm_package" / "__init__.py").unlink()
    sign(run, "tm_package.inner.module:build")
    (run / "tm_package" / "__init__.py").write_text("NAME = 1\n")
    with pytest.raises(UserError):
        require_trusted_run(run)


def test_a_changed_helper_of_a_file_is_refused(run: Path) -> None:
    (run / "functions.py").write_text("def build():\n    import tm_helper\n")
    sign(run, f"{run}/functions.py:build")
    (run / "tm_helper.py").write_text("# changed\n")
    with pytest.raises(UserError):
        require_trusted_run(run)


def test_own_modules_may_change_at_their_place(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the run folder. A newly imported module outside of it is also the user's."""
    source = tmp_path / "source"
    shutil.copytree(run, source)
    shutil.rmtree(run / "tm_package")
    (run / "tm_helper.py").unlink()
    monkeypatch.syspath_prepend(str(source))
    sign(run, "tm_package.inner.module:build")
    module = source / "tm_package" / "inner" / "module.py"
    module.write_text(MODULE + "import tm_new\n")
    (source / "tm_new.py").write_text("")
    require_trusted_run(run)
    (source / "tm_new.py").rename(run / "tm_new.py")
    with pytest.raises(UserError) as refused:
        require_trusted_run(run)
    assert str(run / "tm_new.py") in str(refused.value.got)


def test_another_package_of_this_name_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At another place the content must be the same."""
    sign(run, "tm_package.inner.module:build")
    other = tmp_path / "other"
    shutil.copytree(run / "tm_package", other / "tm_package")
    shutil.copy(run / "tm_helper.py", other)
    monkeypatch.syspath_prepend(str(other))
    require_trusted_run(run)
    (other / "tm_package" / "inner" / "__init__.py").write_text("# changed\n")
    with pytest.raises(UserError):
        require_trusted_run(run)
