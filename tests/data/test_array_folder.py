"""The folder of arrays that ranks map: complete or absent, and nothing in it is executed."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.adapt import adapt_parts
from paceline.data.array_folder import HEADER
from paceline.data.dataset import LoadedData
from paceline.data.registry import check_data_config, load_dataset
from paceline.data.sources.arrays import header_of, write_arrays
from paceline.errors import DataError, UserError
from paceline.runs.drafts import draft_of
from paceline.settings.schema import DataConfig

SAMPLES = np.arange(6 * 3 * 4 * 5, dtype=np.uint8).reshape(6, 3, 4, 5)
LABELS = ["cow", "bee", "ant"] * 2


def data_of(samples: np.ndarray = SAMPLES) -> LoadedData:
    return adapt_parts({"train": (samples, LABELS), "test": (samples[:3], LABELS[:3])}, None, "arrays")


def written(parent: Path, samples: np.ndarray = SAMPLES) -> Path:
    data = data_of(samples)
    return write_arrays(data, header_of(data, is_test_held_out=False), parent)


def config_of(folder: Path) -> DataConfig:
    return DataConfig(dataset="arrays", data_dir=str(folder))


def test_written_arrays_are_read_back(tmp_path: Path) -> None:
    before = data_of()
    loaded = load_dataset(config_of(written(tmp_path)), 0)
    assert loaded.info == before.info
    assert loaded.info.classes == ("ant", "bee", "cow")
    assert loaded.train.labels.tolist() == [2, 1, 0, 2, 1, 0]
    assert torch.equal(loaded.train.read(torch.arange(6)), torch.from_numpy(SAMPLES))
    assert loaded.fingerprint() == before.fingerprint()


def test_the_name_depends_on_every_value(tmp_path: Path) -> None:
    other = SAMPLES.copy()
    other[5, 2, 3, 4] += 1
    names = {written(tmp_path).name, written(tmp_path, other).name, written(tmp_path, SAMPLES.astype("float32")).name}
    assert len(names) == 3
    assert written(tmp_path).name in names


def pickled(path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {path.parent}/executed",)

    np.save(path, np.array([Attack()] * 6, dtype=object), allow_pickle=True)


def linked(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        pickled,
        linked,
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: np.save(path, SAMPLES.astype(np.float64)),
        lambda path: np.save(path, np.asfortranarray(SAMPLES)),
        lambda path: np.save(path, np.full(6, 3)),
        lambda path: np.save(path, np.full(6, -1)),
    ],
)
@pytest.mark.parametrize("name", ["train-samples.npy", "train-labels.npy"])
def test_damaged_arrays_are_refused_and_nothing_is_executed(
    name: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = written(tmp_path)
    damage(folder / name)
    with pytest.raises(DataError) as caught:
        load_dataset(config_of(folder), 0)
    assert caught.value.where == str(folder / name)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"classes": ["one"]}, {"parts": {}}, {"classes": [1, 2]}])
def test_a_damaged_header_is_refused_before_the_start(change: dict[str, object], tmp_path: Path) -> None:
    folder = written(tmp_path)
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | change))
    with pytest.raises(DataError):
        check_data_config(config_of(folder))
    with pytest.raises(DataError):
        check_data_config(config_of(tmp_path / "absent"))


def test_a_killed_writer_leaves_no_complete_folder(tmp_path: Path) -> None:
    """The next call removes its draft. The draft of a running process stays."""
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    assert process.pid is not None
    abandoned, active = draft_of(tmp_path / "new", process.pid), draft_of(tmp_path / "new")
    for draft in (abandoned, active):
        draft.mkdir()
    folder = written(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([active, folder])


def test_a_failed_write_gives_one_screen_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel refuses files of more than 200 bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(UserError):
            written(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "arrays").touch()
    with pytest.raises(UserError):
        written(tmp_path / "arrays")


def test_float_images_are_not_normalised(tmp_path: Path) -> None:
    loaded = load_dataset(config_of(written(tmp_path, SAMPLES.astype("float32"))), 0)
    assert loaded.info.is_float
    assert (loaded.info.mean, loaded.info.std) == ((), ())
    assert not loaded.info.takes_pictures
