"""A file in the working folder never takes the place of a module of Python or of ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli import command

PACELINE = str(Path(sys.executable).with_name("paceline"))  # `python -m` itself would put the folder on the path
QUICK = ["--num-samples=640", "--global-batch-size=64", "--epochs=1", "--track"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "synthetic-mlp", *QUICK, "--processes=1", "--output-dir=run"],
        ["equivalence", "synthetic-mlp", *QUICK, "--world-sizes=1,2", "--max-steps=2", "--output-dir=runs"],
        ["study", "synthetic-mlp", *QUICK, "--world-sizes=1", "--repeats=1", "--strategies=ddp", "--output-dir=study"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_modules_in_the_working_folder_are_not_imported(arguments: list[str], tmp_path: Path) -> None:
    """Neither by the command, nor by a process that it starts."""
    for name in ("torch", "yaml", "random", "tempfile", "numpy", "multiprocessing", "paceline"):
        text = f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise ImportError('planted')\n"
        (tmp_path / f"{name}.py").write_text(text)
    answer = command(PACELINE, *arguments, cwd=tmp_path)
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert answer.code == 0, answer
