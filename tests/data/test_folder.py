"""Folders of pictures: layouts, the stable split, equal pixels on any number of threads, errors with names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.picture_folder import find_pictures
from paceline.data.registry import describe_dataset, load_dataset
from paceline.data.sources.folder import read_picture
from paceline.errors import DataError
from paceline.settings.schema import DataConfig


def config(data_dir: Path, workers: int = 0) -> DataConfig:
    return DataConfig(dataset="folder", data_dir=str(data_dir), image_size=28, num_workers=workers)


def picture(path: Path, width: int = 40, height: int = 30, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


def two_halves(root: Path) -> None:
    for half, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("bird", "ant")):
            for number in range(count):
                picture(root / half / name / f"{number}.png", seed=10 * label + number)


def one_half(root: Path, count: int = 30) -> None:
    for name in ("a", "b"):
        for number in range(count):
            picture(root / name / f"{number}.png", 8, 8, number)


def test_train_and_test_folders(tmp_path: Path) -> None:
    two_halves(tmp_path)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not a picture")
    (tmp_path / "train" / ".cache").mkdir()
    info, data = describe_dataset(config(tmp_path), 0), load_dataset(config(tmp_path), 0)
    assert data.info == info
    assert info.classes == ("ant", "bird")
    assert (info.num_train, info.num_test, info.sample_shape) == (6, 4, (3, 32, 32))
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = read_picture(tmp_path / "train" / "bird" / "1.png", 32)
    assert torch.equal(data.train.read(torch.tensor([4]))[0], expected)


def test_describing_opens_no_picture(tmp_path: Path) -> None:
    for half in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / half / name).mkdir(parents=True)
            (tmp_path / half / name / "broken.JPG").write_bytes(b"")
    assert describe_dataset(config(tmp_path), 0).num_train == 2


def test_pixels_do_not_depend_on_threads(tmp_path: Path) -> None:
    two_halves(tmp_path)
    order = torch.tensor([5, 0, 3, 3])
    alone, together = (load_dataset(config(tmp_path, workers), 0).train.read(order) for workers in (0, 3))
    assert alone.dtype == torch.uint8
    assert alone.shape == (4, 3, 32, 32)
    assert torch.equal(alone, together)


def test_one_folder_is_split_and_new_pictures_move_no_other(tmp_path: Path) -> None:
    one_half(tmp_path)

    def held_names() -> set[str]:
        held = find_pictures(tmp_path).parts["test"]
        return {path.relative_to(tmp_path).as_posix() for path in held.paths}

    before = held_names()
    assert 4 <= len(before) <= 20
    picture(tmp_path / "a" / "000-new.png", 8, 8)
    assert before <= held_names()
    info = describe_dataset(config(tmp_path), 0)
    assert info.num_train + info.num_test == 61


def test_the_central_square_is_scaled(tmp_path: Path) -> None:
    wide = Image.new("RGB", (300, 100), (255, 0, 0))
    wide.paste((0, 255, 0), (100, 0, 200, 100))
    wide.save(tmp_path / "wide.png")
    pixels = read_picture(tmp_path / "wide.png", 50)
    assert pixels[1, :, 1:-1].min() == 255  # the outermost columns blend with pixels outside
    assert pixels[0, :, 1:-1].max() == 0
    assert pixels[1].min() > 200


def test_the_result_is_close_to_scaling_before_cropping(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 90 * 120).reshape(90, 120).astype(np.uint8)
    image = Image.fromarray(ramp).convert("RGB")
    image.save(tmp_path / "p.png")
    scaled = np.array(image.resize((40, 30), Image.Resampling.BILINEAR))[:, 5:35].transpose(2, 0, 1)
    difference = read_picture(tmp_path / "p.png", 30).int() - torch.from_numpy(scaled.copy()).int()
    assert difference.abs().max() <= 2


@pytest.mark.parametrize("fault", ["truncated.jpg", "truncated.png", "empty.png", "text.png", "absent.png"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_picture_is_named(tmp_path: Path, fault: str, workers: int) -> None:
    two_halves(tmp_path)
    bad = tmp_path / "train" / "ant" / fault
    picture(bad, 200, 200)
    data = load_dataset(config(tmp_path, workers), 0)
    whole = bad.read_bytes()
    if fault.startswith("absent"):
        bad.unlink()
    else:
        bad.write_bytes({"tru": whole[: len(whole) // 2], "emp": b"", "tex": b"hello"}[fault[:3]])
    with pytest.raises(DataError) as caught:
        data.train.read(torch.arange(len(data.train)))
    assert str(bad) in caught.value.screen()


def check_refused(root: Path, *said: str) -> None:
    with pytest.raises(DataError) as caught:
        describe_dataset(config(root), 0)
    assert all(words in caught.value.screen() for words in said)


def test_an_empty_folder(tmp_path: Path) -> None:
    check_refused(tmp_path, "no class folder", str(tmp_path))


def test_one_class_only(tmp_path: Path) -> None:
    picture(tmp_path / "cats" / "1.png")
    check_refused(tmp_path, "1 class folder: cats")


def test_csv_files_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "pictures" / "1.png")
    (tmp_path / "train.csv").write_text("path,label\npictures/1.png,cat\n")
    check_refused(tmp_path, "--dataset csv")


def test_classes_without_pictures(tmp_path: Path) -> None:
    two_halves(tmp_path)
    (tmp_path / "train" / "cow").mkdir()
    (tmp_path / "test" / "cow").mkdir()
    check_refused(tmp_path, "no pictures in cow")


def test_halves_that_differ(tmp_path: Path) -> None:
    two_halves(tmp_path)
    picture(tmp_path / "train" / "cow" / "1.png")
    picture(tmp_path / "test" / "dog" / "1.png")
    check_refused(tmp_path, "cow: only in train", "dog: only in test")


def test_no_test_folder(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cow" / "1.png")
    check_refused(tmp_path, "no test folder")


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_a_validation_folder(tmp_path: Path, name: str) -> None:
    two_halves(tmp_path)
    for label in ("ant", "bird"):
        picture(tmp_path / name / label / "7.png", seed=7)
    data = load_dataset(config(tmp_path), 0)
    assert data.info == describe_dataset(config(tmp_path), 0)
    assert (data.info.num_train, data.info.num_validation, data.info.num_test) == (6, 2, 4)
    assert dict(data.info.folders) == {"train": "train/", "validation": f"{name}/", "test": "test/"}
    assert data.validation is not None
    expected = read_picture(tmp_path / name / "bird" / "7.png", 32)
    assert torch.equal(data.validation.read(torch.tensor([1]))[0], expected)


def test_two_validation_folders(tmp_path: Path) -> None:
    two_halves(tmp_path)
    (tmp_path / "val").mkdir()
    (tmp_path / "valid").mkdir()
    check_refused(tmp_path, "val, valid")


def test_a_validation_folder_with_other_classes(tmp_path: Path) -> None:
    two_halves(tmp_path)
    for label in ("ant", "cow"):
        picture(tmp_path / "val" / label / "7.png")
    check_refused(tmp_path, "bird: only in train", "cow: only in val")


@pytest.mark.parametrize("names", [("val", "test"), ("Training", "testing"), ("part1", "part2")])
def test_parent_folders_of_classes_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    """Otherwise their names would be two classes."""
    two_halves(tmp_path)
    (tmp_path / "train").rename(tmp_path / names[0])
    (tmp_path / "test").rename(tmp_path / names[1])
    check_refused(tmp_path, *names, "ant, bird")


def test_valid_may_be_a_class(tmp_path: Path) -> None:
    one_half(tmp_path)
    (tmp_path / "a").rename(tmp_path / "valid")
    assert describe_dataset(config(tmp_path), 0).classes == ("b", "valid")


def test_folders_below_a_class_folder_and_all_extensions_are_read(tmp_path: Path) -> None:
    two_halves(tmp_path)
    picture(tmp_path / "train" / "ant" / "holiday" / "2019" / "1.png")
    for number, name in enumerate(("x.jfif", "y.jpe", "z.JPG")):
        Image.new("RGB", (9, 9)).save(tmp_path / "train" / "ant" / name, "JPEG", quality=50 + number)
    found = find_pictures(tmp_path)
    names = [path.relative_to(tmp_path / "train").as_posix() for path in found.parts["train"].paths]
    ant = ["0.png", "1.png", "2.png", "holiday/2019/1.png", "x.jfif", "y.jpe", "z.JPG"]
    assert names == [*(f"ant/{name}" for name in ant), *(f"bird/{number}.png" for number in range(3))]
    assert len(found.skipped) == 0
    data = load_dataset(config(tmp_path), 0)
    assert data.train.read(torch.arange(10)).shape == (10, 3, 32, 32)


def test_skipped_files_are_counted_by_reason(tmp_path: Path) -> None:
    """Folders of an operating system cause no error, empty or not."""
    two_halves(tmp_path)
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "train" / "__MACOSX" / "ant").mkdir(parents=True)
    picture(tmp_path / "train" / "ant" / "__MACOSX" / "1.png")
    (tmp_path / "test" / ".thumbnails").mkdir()
    (tmp_path / "extra").mkdir()
    (tmp_path / "train" / "ant" / "._0.png").write_bytes(b"")
    (tmp_path / "train" / "ant" / "raw.heic").write_bytes(b"")
    (tmp_path / "train" / "list.csv").write_bytes(b"")
    (tmp_path / "train" / "bird" / "gone.png").symlink_to("nowhere")
    skipped = find_pictures(tmp_path).skipped
    sizes = {reason.split(":")[0].split(",")[0]: len(paths) for reason, paths in skipped.by_reason.items()}
    assert sizes == {
        "hidden": 5,
        "a folder beside train that is no part of the data": 1,
        ".heic": 1,
        "not in a class folder": 1,
        "not a file": 1,
    }
    info = describe_dataset(config(tmp_path), 0)
    assert (info.num_train, info.classes, info.num_skipped) == (6, ("ant", "bird"), 9)


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    two_halves(tmp_path)
    (tmp_path / "train" / "ant" / "again").symlink_to(tmp_path / "train" / "ant")
    check_refused(tmp_path, "nested too deeply")


def test_too_few_to_split(tmp_path: Path) -> None:
    one_half(tmp_path, count=1)
    check_refused(tmp_path, "too few pictures")
