"""Pictures listed in CSV files: labels of every task, splits, and errors with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.task_data import write_pictures
from paceline.data.fingerprint import fingerprint_of, sample_keys
from paceline.data.registry import check_data_config, load_dataset
from paceline.errors import EXIT_DATA, DataError, UserError
from paceline.settings.schema import DataConfig

ROWS = {
    "train.csv": [("a/1.png", "cat"), ("a/2.png", "dog"), ("b/3.png", "cat")],
    "test.csv": [("b/4.png", "dog")],
}


def config(folder: Path, task: str = "single-label") -> DataConfig:
    return DataConfig(dataset="csv", data_dir=str(folder), task=task, image_size=8, num_workers=0)  # type: ignore[arg-type]


def test_one_label_per_picture(tmp_path: Path) -> None:
    write_pictures(tmp_path, ROWS)
    data = load_dataset(config(tmp_path), 0)
    assert (data.info.classes, data.info.task, data.info.name) == (("cat", "dog"), "single-label", "csv")
    assert data.train.labels.tolist() == [0, 1, 0]
    assert data.test.labels.tolist() == [1]
    assert data.validation is None
    assert data.train.read(torch.arange(3)).shape == (3, 3, 9, 9)  # like folders: the crop has 8 of 9 pixels
    keys = sample_keys(data.train)
    assert keys is not None
    assert len(keys.unique()) == 3


def test_several_labels_or_none(tmp_path: Path) -> None:
    rows = {"train.csv": [("1.png", "wet; cold"), ("2.png", "cold"), ("3.png", "")], "test.csv": [("4.png", "wet")]}
    write_pictures(tmp_path, {**rows, "val.csv": [("5.png", "cold;wet")]})
    data = load_dataset(config(tmp_path, "multi-label"), 0)
    assert data.info.classes == ("cold", "wet")
    assert data.train.labels.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert data.validation is not None
    assert data.validation.labels.tolist() == [[1, 1]]


def test_numbers(tmp_path: Path) -> None:
    write_pictures(tmp_path, {"train.csv": [("1.png", "1.5;-2"), ("2.png", "0;1e3")], "test.csv": [("3.png", "1;2")]})
    data = load_dataset(config(tmp_path, "regression"), 0)
    assert data.train.labels.tolist() == [[1.5, -2.0], [0.0, 1000.0]]
    assert data.info.classes == ("target-1", "target-2")


def test_one_table_is_split_by_the_names_of_the_pictures(tmp_path: Path) -> None:
    rows = [(f"{number}.png", "even" if number % 2 == 0 else "odd") for number in range(60)]
    write_pictures(tmp_path, {"labels.csv": rows})
    first = load_dataset(config(tmp_path), 0)
    write_pictures(tmp_path, {"labels.csv": [*rows, ("more.png", "odd")]})
    second = load_dataset(config(tmp_path), 0)
    assert len(first.train) + len(first.test) == 60
    assert 3 <= len(first.test) <= 24
    assert len(second.train) + len(second.test) == 61
    assert abs(len(second.test) - len(first.test)) <= 1
    assert fingerprint_of(first) != fingerprint_of(second)


def test_a_column_of_weights(tmp_path: Path) -> None:
    write_pictures(tmp_path, ROWS)
    lines = (tmp_path / "train.csv").read_text().splitlines()
    weighted = [f"{line},{weight}" for line, weight in zip(lines, ("weight", "1", "0", "2.5"), strict=True)]
    (tmp_path / "train.csv").write_text("\n".join(weighted) + "\n")
    weights = getattr(load_dataset(config(tmp_path), 0).train, "sample_weights", torch.zeros(0))
    assert weights.tolist() == [1.0, 0.0, 2.5]
    (tmp_path / "train.csv").write_text("\n".join([*weighted[:-1], lines[-1]]) + "\n")
    with pytest.raises(DataError, match="no weight") as refused:
        load_dataset(config(tmp_path), 0)
    assert refused.value.where == f"{tmp_path / 'train.csv'}, line 4"


@pytest.mark.parametrize(
    ("task", "line", "what"),
    [
        ("single-label", "a/9.png,cat", "do not exist"),
        ("single-label", "a/2.png,", "no label"),
        ("single-label", "a/2.png", "no label"),
        ("single-label", ",cat", "no path"),
        ("single-label", "a/1.png,dog", "twice"),
        ("single-label", "readme.txt,cat", "not the name of a picture"),
        ("regression", "a/2.png,warm", "no number"),
        ("regression", "a/2.png,inf", "no number"),
        ("regression", "a/2.png,", "no label"),
        ("regression", "a/2.png,1;2", "different numbers of values"),
        ("multi-label", "a/2.png,cat;;dog", "no label"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, task: str, line: str, what: str) -> None:
    first = "1.0" if task == "regression" else "cat"
    write_pictures(tmp_path, {"train.csv": [("a/1.png", first), ("a/2.png", "dog")], "test.csv": [("t.png", first)]})
    (tmp_path / "readme.txt").touch()
    (tmp_path / "train.csv").write_text(f"path,label\na/1.png,{first}\n{line}\n")
    with pytest.raises(DataError, match=what) as refused:
        check_data_config(config(tmp_path, task))
    assert refused.value.where == f"{tmp_path / 'train.csv'}, line 3"
    assert refused.value.exit_code == EXIT_DATA


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        check_data_config(config(tmp_path / "absent"))
    with pytest.raises(DataError, match="not here"):
        check_data_config(config(tmp_path))
    write_pictures(tmp_path, ROWS)
    (tmp_path / "test.csv").write_text("path,label\na/1.png,bird\n")
    with pytest.raises(DataError, match="does not occur in the training part"):
        check_data_config(config(tmp_path))
    (tmp_path / "test.csv").write_text("file,label\na/1.png,cat\n")
    with pytest.raises(DataError, match="no column path"):
        check_data_config(config(tmp_path))
    (tmp_path / "test.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"cannot be read|no column"):
        check_data_config(config(tmp_path))
    (tmp_path / "test.csv").unlink()
    with pytest.raises(DataError, match="not here"):
        check_data_config(config(tmp_path))
