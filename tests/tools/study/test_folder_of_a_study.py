"""A study writes only into its own folders, and removes only its own runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline

FLAGS = [
    "--world-sizes=1",
    "--strategies=ddp",
    "--repeats=1",
    "--num-samples=640",
    "--global-batch-size=64",
    "--epochs=2",
]


@pytest.mark.parametrize("name", ["results.csv", "report.html", "cells/ddp-1-r1/thesis.txt", "notes.txt"])
def test_a_folder_with_other_files_is_refused(name: str, tmp_path: Path) -> None:
    """Exit code 2, and nothing changes."""
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("years of work")
    before = sorted(tmp_path.rglob("*"))
    answer = paceline("study", "shapes-cnn", *FLAGS, "--output-dir=mine", cwd=tmp_path)
    assert answer.code == 2, answer
    assert file.read_text() == "years of work"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "kind", ["link", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("folder", "file", "dangling link"))]
)
def test_a_cell_folder_with_other_content_is_refused(kind: str, tmp_path: Path) -> None:
    """Also in the folder of a study. A link is not followed."""
    answer = paceline("study", "shapes-cnn", *FLAGS, "--output-dir=study", cwd=tmp_path)
    assert answer.code == 0, answer
    (cell,) = (tmp_path / "study" / "cells").glob("ddp-1-r1")
    cell.rename(tmp_path / "moved")
    cell.with_suffix(".json").unlink(missing_ok=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    if kind == "folder":
        (tmp_path / "other").rename(cell)
    elif kind == "file":
        cell.write_text("years of work")
    else:
        cell.symlink_to(tmp_path / ("other" if kind == "link" else "nowhere"))
    answer = paceline("study", "shapes-cnn", *FLAGS, "--output-dir=study", cwd=tmp_path)
    assert answer.code == 2, answer
    kept = [path for path in (cell / "thesis.txt", tmp_path / "other" / "thesis.txt", cell) if path.is_file()]
    assert kept or kind == "dangling link"
