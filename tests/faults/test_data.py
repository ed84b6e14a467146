"""Fault 13: reading data fails.

Paceline reads with threads, not with worker processes, so no worker can be killed on its own. An exception in the
data phase of a rank has the effect of a killed worker.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from harness.cli import command, paceline
from harness.short_run import FLAGS, injected_faults, outcome, read_failures, run_undisturbed
from paceline.data.sources.shapes import CLASSES, make_shapes


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of small pictures. One picture is truncated."""
    folder = tmp_path_factory.mktemp("pictures")
    samples, labels = make_shapes(60, seed=1, stream=0)
    for name in CLASSES[:2]:
        (folder / name).mkdir()
    for number, (sample, label) in enumerate(zip(samples, labels % 2, strict=True)):
        Image.fromarray(sample.permute(1, 2, 0).numpy()).save(folder / CLASSES[int(label)] / f"{number:03}.png")
    return folder


def folder_run(pictures: Path, folder: Path, *flags: str) -> list[str]:
    shutil.copytree(pictures, folder / "data")
    victim = sorted(path for path in (folder / "data").rglob("*.png"))[3]
    victim.write_bytes(victim.read_bytes()[:60])
    return [
        *("train", "shapes-cnn", "--dataset=folder", "--data-dir=data", "--image-size=32", "--global-batch-size=8"),
        *("--epochs=1", "--processes=2", "--track", "--output-dir=run", *flags),
    ]


# Fault 13
def test_a_broken_picture_is_named_with_its_file_sample_and_reader(pictures: Path, tmp_path: Path) -> None:
    answer = paceline(*folder_run(pictures, tmp_path), cwd=tmp_path)
    assert answer.code == 3, answer
    assert "this picture cannot be read" in answer.err
    assert re.search(r"data/\w+/\d+\.png, sample \d+ \(read by (reader|read-ahead|MainThread)", answer.err), answer.err
    assert "--unreadable 1" in answer.err
    assert "Traceback" not in answer.err


# Fault 13
@pytest.mark.faults
def test_a_broken_picture_is_counted_and_replaced_if_allowed(pictures: Path, tmp_path: Path) -> None:
    answer = paceline(*folder_run(pictures, tmp_path, "--unreadable=1"), cwd=tmp_path)
    assert answer.code == 0, answer
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "warning: unreadable" in logs


# Fault 13
@pytest.mark.faults
def test_a_reader_that_fails_once_loses_no_sample(tmp_path: Path) -> None:
    for name in ("disturbed", "undisturbed"):
        (tmp_path / name).mkdir()
    undisturbed = run_undisturbed(tmp_path / "undisturbed")
    answer = paceline(*FLAGS, "--inject=raise rank=1 step=12 phase=data", cwd=tmp_path / "disturbed")
    assert answer.code == 0, answer
    assert injected_faults(tmp_path / "disturbed" / "run") == ["raise (rank 1, step 12, data)"]
    (failure,) = read_failures(tmp_path / "disturbed" / "run")
    assert (failure["rank"], failure["step"], failure["phase"]) == (1, 12, "data")
    assert outcome(tmp_path / "disturbed" / "run") == undisturbed


# Fault 13
@pytest.mark.faults
def test_out_of_memory_while_reading_data_is_named(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "paceline", *FLAGS, "--max-restarts=0", "--inject='leak rank=1 step=12 phase=data'"]
    answer = command("bash", "-c", f"ulimit -v 4000000; exec {' '.join(run)}", cwd=tmp_path)
    assert answer.code == 70, answer
    assert injected_faults(tmp_path / "run") == ["leak (rank 1, step 12, data)"]
    assert "out of memory" in answer.err
    assert "data of step 12" in answer.err
