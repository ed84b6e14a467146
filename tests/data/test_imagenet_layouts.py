"""ImageNet as it is published: train folders, and validation pictures in one folder with a list of their classes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from harness.archive_files import CLASSES, make_pictures
from paceline.data.dataset import LoadedData
from paceline.data.registry import load_dataset
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

PARTS = {"train": 3, "test": 2}


def load(data_dir: Path) -> LoadedData:
    return load_dataset(DataConfig(dataset="folder", data_dir=str(data_dir), image_size=28, num_workers=0), 0)


@pytest.fixture
def sorted_set(tmp_path: Path) -> Path:
    """Test pictures in class folders, with names that are unique."""
    root = make_pictures(tmp_path / "sorted", PARTS)
    for number, path in enumerate(sorted((root / "test").rglob("*.jpg"), reverse=True)):
        path.rename(path.with_name(f"val_{number:08}.JPEG"))
    return root


def flat(root: Path, target: Path, folder: str) -> dict[str, str]:
    """The same pictures, those of the test in one folder. The class of each."""
    shutil.copytree(root / "train", target / "train")
    (target / folder).mkdir(parents=True)
    class_of = {}
    for path in sorted((root / "test").rglob("*.JPEG")):
        shutil.copy(path, target / folder / path.name)
        class_of[path.name] = path.parent.name
    return dict(sorted(class_of.items()))


def require_same(found: LoadedData, wanted: LoadedData) -> None:
    assert found.info == wanted.info
    assert torch.equal(found.test.labels, wanted.test.labels)
    every = torch.arange(len(wanted.test))
    assert torch.equal(found.test.read(every), wanted.test.read(every))
    assert dict(found.info.folders)["test"] == "val/"


def test_tiny_imagenet(sorted_set: Path, tmp_path: Path) -> None:
    to = tmp_path / "tiny"
    class_of = flat(sorted_set, to, "val/images")
    for name in CLASSES:
        (to / "train" / name).rename(tmp_path / name)
        (to / "train" / name).mkdir()
        (tmp_path / name).rename(to / "train" / name / "images")
        (to / "train" / name / f"{name}_boxes.txt").write_text("1.jpg\t0\t0\t9\t9\n")
    (to / "val" / "val_annotations.txt").write_text("".join(f"{n}\t{c}\t0\t0\t9\t9\n" for n, c in class_of.items()))
    (to / "test" / "images").mkdir(parents=True)  # without labels
    (to / "test" / "images" / "test_0.JPEG").touch()
    require_same(load(to), load(sorted_set))


def test_kaggle(sorted_set: Path, tmp_path: Path) -> None:
    to = tmp_path / "kaggle"
    class_of = flat(sorted_set, to / "ILSVRC/Data/CLS-LOC", "val")
    rows = [f"{Path(name).stem},{label} 1 2 3 4 {label} 5 6 7 8 " for name, label in class_of.items()]
    (to / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")
    for data_dir in (to, to / "ILSVRC/Data/CLS-LOC"):
        require_same(load(data_dir), load(sorted_set))


LISTS = {
    "imagenet_2012_validation_synset_labels.txt": lambda name, label: label,
    "ILSVRC2012_validation_ground_truth.txt": lambda name, label: str(2 - CLASSES.index(label)),
    "val.txt": lambda name, label: f"{name} {CLASSES.index(label)}",
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str, sorted_set: Path, tmp_path: Path) -> None:
    to = tmp_path / "flat"
    class_of = flat(sorted_set, to, "val")
    (to / name).write_text("".join(f"{LISTS[name](*item)}\n" for item in class_of.items()))
    if "ground_truth" in name:
        with pytest.raises(DataError, match="development kit"):
            load(to)
        (to / "map_clsloc.txt").write_text(f"{CLASSES[1]} 1 a_bird\n{CLASSES[0]} 2 an_ant\n")
    require_same(load(to), load(sorted_set))


def test_lists_that_do_not_fit(sorted_set: Path, tmp_path: Path) -> None:
    def refused(part: str) -> None:
        with pytest.raises(DataError) as failure:
            load(to)
        assert part in failure.value.screen()

    to = tmp_path / "flat"
    class_of = flat(sorted_set, to, "val")
    refused("LOC_val_solution.csv")
    labels = to / "val_annotations.txt"
    labels.write_text("ant\n")
    refused("1 lines for 4 pictures")
    labels.write_text("val_00000000.JPEG ant\n")
    refused("no class for val_00000001.JPEG, and 2 more")
    labels.write_text("".join(f"{name} wasp\n" for name in class_of))
    refused("wasp")
    labels.write_bytes(b"\xff\xfe")
    refused("UTF-8")


def test_validation_folders_are_the_test_without_one(sorted_set: Path, tmp_path: Path) -> None:
    shutil.copytree(sorted_set, tmp_path / "to")
    (tmp_path / "to" / "test").rename(tmp_path / "to" / "val")
    require_same(load(tmp_path / "to"), load(sorted_set))
