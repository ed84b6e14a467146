"""Paths in a CSV file: nothing outside of the data folder is read, and nothing waits for a FIFO."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from paceline.data.picture_table import read_tables
from paceline.data.pictures import read_pixels
from paceline.errors import DataError


@pytest.mark.parametrize("path", ["../secret.png", "a/../../secret.png", "{folder}/secret.png"])
def test_paths_outside_of_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    data = tmp_path / "data"
    (data / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(data / "0.png")
    row = path.format(folder=tmp_path)
    for name in ("train.csv", "test.csv"):
        (data / name).write_text(f"path,label\n0.png,x\n{row},y\n")
    with pytest.raises(DataError) as refused:
        read_tables(data, "single-label")
    assert str(refused.value.got) == row


def test_a_fifo_is_refused_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.png")
    with pytest.raises(DataError):
        read_pixels(tmp_path / "f.png", 8)
