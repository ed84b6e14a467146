"""Parquet files of Hugging Face: the samples of a folder, with and without copies; wrong columns and labels."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.archive_files import make_pictures, write_parquet
from harness.extras import need_packages
from paceline.cli.main import main
from paceline.data.archives import file_cache
from paceline.data.fingerprint import fingerprint_of
from paceline.data.registry import load_dataset
from paceline.errors import DataError, UserError
from paceline.settings.schema import DataConfig

PARTS = {"train": 5, "validation": 2, "test": 3}


def config(data_dir: Path, **more: Any) -> DataConfig:
    return DataConfig(dataset="folder", data_dir=str(data_dir), image_size=28, num_workers=0, **more)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_pyarrow_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError) as failure:
        load_dataset(config(tmp_path), 0)
    assert "[parquet]" in str(failure.value.hint)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names that hold their class: those in parquet files have no folder."""
    root = make_pictures(tmp_path_factory.mktemp("pictures") / "set", PARTS)
    for path in sorted(root.rglob("*.jpg")):
        path.rename(path.with_name(f"{path.parent.name}_{path.name}"))
    return root


@pytest.fixture(scope="module")
def parquet(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_packages("pyarrow")
    plain = make_pictures(tmp_path_factory.mktemp("plain") / "set", PARTS)
    return write_parquet(plain, tmp_path_factory.mktemp("to") / "data")


def test_the_samples_of_the_folder_with_and_without_copies(pictures: Path, parquet: Path, tmp_path: Path) -> None:
    wanted = load_dataset(config(pictures), 0)
    for data_dir, more in (
        (parquet, {}),
        (parquet, {"cache_gb": 0.0, "cache_dir": str(tmp_path / "none")}),  # no room for copies
        (parquet.parent, {}),  # the folder of a repository: its files are in data
    ):
        found = load_dataset(config(data_dir, **more), 0)
        assert found.info == wanted.info
        fingerprint = fingerprint_of(found)
        assert fingerprint["train"].pop("window", None) == ("1 of 2 data files at a time" if more else None)
        assert fingerprint == fingerprint_of(wanted)
        for (_, one), (_, other) in zip(found.parts(), wanted.parts(), strict=True):
            assert torch.equal(one.read(torch.arange(len(one))), other.read(torch.arange(len(other))))
    assert not list((tmp_path / "none" / "data").glob("*.data"))


def test_a_damaged_copy_is_made_again(pictures: Path, parquet: Path, cache: Path) -> None:
    data, wanted = load_dataset(config(parquet), 0), load_dataset(config(pictures), 0)
    copies = sorted((cache / "data").glob("*.data"))
    assert len(copies) == 6
    for path in copies:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    every = torch.arange(len(data.train))
    assert torch.equal(data.train.read(every), wanted.train.read(every))
    for path in copies:
        path.unlink()
    assert torch.equal(data.train.read(every), wanted.train.read(every))


def test_a_cache_whose_disk_fails_is_no_error(
    pictures: Path, parquet: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, wanted = load_dataset(config(parquet), 0), load_dataset(config(pictures), 0)

    def fail(*of: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file_cache, "read_at", fail)
    every = torch.arange(len(data.train))
    assert torch.equal(data.train.read(every), wanted.train.read(every))


def test_pictures_without_names(tmp_path: Path) -> None:
    need_packages("pyarrow")
    root = make_pictures(tmp_path / "set", {"train": 2, "test": 1})
    to = write_parquet(root, tmp_path / "to", with_path=False)
    names = list(load_dataset(config(to), 0).train.names())  # type: ignore[attr-defined]
    assert names == [
        b"train/ant/train-00000-of-00002-00000000",
        b"train/ant/train-00001-of-00002-00000000",
        b"train/bird/train-00000-of-00002-00000001",
        b"train/bird/train-00001-of-00002-00000001",
    ]


def test_a_test_file_without_labels_is_skipped(
    pictures: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in ImageNet on Hugging Face: the validation pictures are the test pictures."""
    need_packages("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    to = write_parquet(pictures, tmp_path / "to")
    for path in to.glob("test-*"):
        table = pq.read_table(path)
        labels = pa.array([-1] * len(table), pa.int64())
        pq.write_table(table.set_column(table.schema.get_field_index("label"), "label", labels), path)
    assert main(["data", "check", str(to)]) == 0
    assert "10 train and 4 test pictures" in capsys.readouterr().out
    data = load_dataset(config(to), 0)
    assert data.info.num_skipped == 2
    assert not data.info.num_validation
    assert sum(path.stat().st_size == 0 for path in (cache / "data").glob("*.data")) == 2  # not copied


def test_files_that_repeat_names_are_numbered(pictures: Path, tmp_path: Path) -> None:
    need_packages("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    to = write_parquet(pictures, tmp_path / "to")
    for path in to.glob("train-*"):
        table = pq.read_table(path)
        cells = [{**cell, "path": f"{row}.jpg"} for row, cell in enumerate(table.column("image").to_pylist())]
        pq.write_table(
            table.set_column(0, "image", pa.array(cells)).replace_schema_metadata(table.schema.metadata), path
        )
    data = load_dataset(config(to), 0).train
    names = list(data.names())  # type: ignore[attr-defined]
    assert names[0] == b"train/ant/train-00000-of-00002-00000000"
    assert len(set(names)) == len(names) == 10
    # A copy of a file is still refused.
    (to / "train-00009.parquet").write_bytes((to / "train-00000-of-00002.parquet").read_bytes())
    with pytest.raises(DataError, match="the same name"):
        load_dataset(config(to), 0)


def test_wrong_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_packages("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    cell = {"bytes": b"x", "path": "1.jpg"}
    wrong: dict[str, tuple[dict[str, list[Any]], str]] = {
        "no picture": ({"text": ["a"], "label": [0]}, "no column of pictures"),
        "no label": ({"image": [cell], "text": [0.5]}, "no column of labels"),
        "a missing label": ({"image": [cell], "label": pa.array([None], pa.int64())}, "row 0"),  # type: ignore[dict-item]
        "a label -1": ({"image": [cell], "label": [-1]}, "row 0"),
    }
    for columns, names in wrong.values():
        pq.write_table(pa.table(columns), tmp_path / "train.parquet")
        assert main(["plan", "folder-resnet50", "--data-dir", str(tmp_path)]) == 3
        shown = capsys.readouterr().err
        assert names in shown
        assert "train.parquet" in shown
    content = (tmp_path / "train.parquet").read_bytes()
    for damaged in (content[: len(content) // 2], b"x" * 100, b""):
        (tmp_path / "train.parquet").write_bytes(damaged)
        with pytest.raises(DataError) as failure:
            load_dataset(config(tmp_path), 0)
        assert "train.parquet" in failure.value.screen()
