"""A user's own data set: every accepted form works, every other form is explained."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.dataset import LoadedData
from paceline.data.registry import check_dataset_name, describe_dataset, load_dataset
from paceline.data.sources import custom
from paceline.errors import DataError, PacelineError, UserError
from paceline.settings.schema import DataConfig


@pytest.fixture(autouse=True)
def fresh() -> None:
    custom.load.cache_clear()


def written(folder: Path, source: str, name: str = "mine.py") -> str:
    preamble = "import numpy as np\nimport torch\nfrom PIL import Image\n"
    (folder / name).write_text(preamble + textwrap.dedent(source))
    return f"{folder / name}:make_dataset"


def loaded(folder: Path, source: str) -> LoadedData:
    return load_dataset(DataConfig(dataset=written(folder, source), data_dir="here"), 9)


def refused(folder: Path, source: str) -> str:
    with pytest.raises(PacelineError) as caught:
        loaded(folder, source)
    assert "mine.py" in caught.value.screen()
    return caught.value.screen()


def returning(expression: str) -> str:
    return f"""
        class Map:
            def __init__(self, items): self.items = items
            def __len__(self): return len(self.items)
            def __getitem__(self, i): return self.items[i]

        class Reader:
            labels = [0, 1, 2]
            classes = ["x", "y", "z"]
            def read(self, indices): return np.full((len(indices), 8, 8, 3), 7, dtype=np.uint8)

        images = torch.arange(4 * 3 * 8 * 9, dtype=torch.int64).to(torch.uint8).reshape(4, 3, 8, 9)
        vectors = np.arange(12.0).reshape(4, 3)
        labels = [0, 1, 0, 1]

        def make_dataset():
            return {expression}
    """


@pytest.mark.parametrize(
    ("half", "shape", "dtype", "classes"),
    [
        ("(images, labels)", (3, 8, 9), torch.uint8, 2),
        ("(images.numpy(), np.array(labels, dtype=np.uint8))", (3, 8, 9), torch.uint8, 2),
        ("(images.permute(0, 2, 3, 1), torch.tensor(labels))", (3, 8, 9), torch.uint8, 2),
        ("(images[:, 0], labels)", (1, 8, 9), torch.uint8, 2),
        ("(vectors, labels)", (3,), torch.float32, 2),
        ("Reader()", (3, 8, 8), torch.uint8, 3),
        ("Map([(images[i], i) for i in range(4)])", (3, 8, 9), torch.uint8, 4),
        ("Map([(vectors[i], torch.tensor(0)) for i in range(4)])", (3,), torch.float32, 2),
        ("Map([(Image.new('RGB', (9, 8)), np.int64(n)) for n in (0, 1)])", (3, 8, 9), torch.uint8, 2),
        ("Map([(Image.new('L', (9, 8)), n) for n in (1, 0)])", (1, 8, 9), torch.uint8, 2),
        ("torch.utils.data.TensorDataset(images, torch.tensor(labels))", (3, 8, 9), torch.uint8, 2),
    ],
)
def test_every_form_of_a_half(
    tmp_path: Path, half: str, shape: tuple[int, ...], dtype: torch.dtype, classes: int
) -> None:
    data = loaded(tmp_path, returning(f"{half}, {half}"))
    batch = data.train.read(torch.tensor([0, 0]))
    assert batch.shape == (2, *shape)
    assert batch.dtype == dtype
    assert data.train.labels.dtype == torch.int64
    assert data.info.sample_shape == shape
    assert data.info.num_classes == classes
    assert len(data.info.mean) == len(data.info.std) == (shape[0] if len(shape) == 3 else 0)
    assert len(data.train) == data.info.num_train == len(data.train.labels)


def test_pixels_are_unchanged(tmp_path: Path) -> None:
    data = loaded(tmp_path, returning("(images.permute(0, 2, 3, 1), labels), Map([(images[i], 0) for i in (2, 3)])"))
    images = torch.arange(4 * 3 * 8 * 9, dtype=torch.int64).to(torch.uint8).reshape(4, 3, 8, 9)
    assert torch.equal(data.train.read(torch.tensor([3, 1])), images[[3, 1]])
    assert torch.equal(data.test.read(torch.tensor([1, 0])), images[[3, 2]])
    np.testing.assert_allclose(data.info.mean, images.double().mean((0, 2, 3)) / 255)


@pytest.mark.parametrize(
    "expression",
    [
        "(images, labels), (images, labels), ['cat', 'dog']",
        "{'train': (images, labels), 'test': (images, labels), 'classes': ('cat', 'dog')}",
    ],
)
def test_class_names(tmp_path: Path, expression: str) -> None:
    assert loaded(tmp_path, returning(expression)).info.classes == ("cat", "dog")


@pytest.mark.parametrize("key", ["validation", "val", "valid"])
def test_a_validation_set(tmp_path: Path, key: str) -> None:
    more = f"'{key}': (images[1:], labels[1:])"
    data = loaded(tmp_path, returning(f"{{'train': (images, labels), 'test': (images[:2], labels[:2]), {more}}}"))
    assert data.validation is not None
    assert (data.info.num_train, data.info.num_validation, data.info.num_test) == (4, 3, 2)
    assert data.validation.labels.tolist() == [1, 0, 1]
    assert [name for name, _ in data.parts()] == ["train", "validation", "test"]
    custom.load.cache_clear()
    without = loaded(tmp_path, returning("{'train': (images, labels), 'test': (images, labels), 'validation': None}"))
    assert (without.validation, without.info.num_validation) == (None, 0)


@pytest.mark.parametrize(
    ("labels", "shown"), [("[0, 10, 20, 0]", "0, 10, 20"), ("[1, 2, 1, 2]", "1, 2"), ("[3, 3, 3, 3]", "3")]
)
def test_labels_with_gaps_are_refused(tmp_path: Path, labels: str, shown: str) -> None:
    """Otherwise there would silently be as many classes as the largest label."""
    screen = refused(tmp_path, returning(f"(images, {labels}), (images, {labels})"))
    assert shown in screen
    assert "return_inverse" in screen


def test_a_label_that_only_the_test_set_has_is_no_gap(tmp_path: Path) -> None:
    assert loaded(tmp_path, returning("(images, [0, 2, 0, 2]), (images, [1, 1, 1, 1])")).info.num_classes == 3


def test_classes_without_samples_can_be_declared(tmp_path: Path) -> None:
    half = "(images, [0, 10, 20, 0])"
    info = loaded(tmp_path, returning(f"{half}, {half}, 25")).info
    assert info.classes == tuple(map(str, range(25)))
    custom.load.cache_clear()
    names = loaded(tmp_path, returning(f"{half}, {half}, list('abcdefghijklmnopqrstu')")).info.classes
    assert len(names) == 21
    custom.load.cache_clear()
    assert "number of classes" in refused(tmp_path, returning(f"{half}, {half}, 20"))


def test_pictures_of_a_function_follow_the_rules_for_all_pictures(tmp_path: Path) -> None:
    """EXIF rotates them, 16 bits are scaled, floats above 1 are refused."""
    turned = """
        def make_dataset():
            image = Image.fromarray(np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3))
            image.getexif()[0x0112] = 6
            deep = Image.fromarray(np.full((9, 8), 40_000, dtype=np.uint16))
            return [(image, 0), (deep, 1)], [(image, 0), (deep, 1)]
    """
    source = turned.replace("[(image, 0), (deep, 1)]", "Map([(image, 0), (deep, 1)])")
    data = loaded(tmp_path, returning("None") + source)
    pixels = data.train.read(torch.tensor([0, 1]))
    upright = np.rot90(np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3), -1)
    assert torch.equal(pixels[0], torch.from_numpy(upright.copy()).permute(2, 0, 1))
    assert pixels[1].unique().tolist() == [40_000 // 256]
    custom.load.cache_clear()
    half = "Map([(Image.new('F', (8, 8), 200.0), 0)])"
    assert "0 (black) to 1 (white)" in refused(tmp_path, returning(f"{half}, {half}"))


def test_class_names_from_the_data_set(tmp_path: Path) -> None:
    assert loaded(tmp_path, returning("Reader(), Reader()")).info.classes == ("x", "y", "z")


def test_arguments_are_passed_by_name(tmp_path: Path) -> None:
    source = """
        def make_dataset(seed, data_dir, extra=1):
            assert (seed, data_dir) == (9, "here")
            return (np.zeros((2, 3)), [0, 1]), (np.zeros((2, 3)), [0, 1])
    """
    assert len(loaded(tmp_path, source).train) == 2
    everything = source.replace("seed, data_dir, extra=1", "**given").replace(
        '(seed, data_dir) == (9, "here")', 'sorted(given) == ["config", "data_dir", "seed"]'
    )
    custom.load.cache_clear()
    assert len(loaded(tmp_path, everything).train) == 2


def test_described_and_loaded_with_one_call(tmp_path: Path) -> None:
    source = """
        calls = []
        def make_dataset():
            calls.append(1)
            assert len(calls) == 1
            return (np.zeros((2, 3)), [0, 1]), (np.zeros((2, 3)), [0, 1])
    """
    config = DataConfig(dataset=written(tmp_path, source))
    assert describe_dataset(config, 0) == load_dataset(config, 0).info


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("None", "(train, test)"),
        ("[1, 2, 3, 4]", "a list of length 4"),
        ("{'train': (images, labels)}", "(train, test)"),
        ("{'train': (images, labels), 'test': (images, labels), 'dev': (images, labels)}", "'dev'"),
        ("{'train': (images, labels), 'test': (images, labels), 'val': (vectors, labels)}", "train and validation"),
        ("{'train': (images, labels), 'test': (images, labels), 'val': (images, [-1] * 4)}", "validation part"),
        ("{'train': (images, labels), 'test': None}", "test part"),
        ("5, (images, labels)", "train part"),
        ("(images, labels), 'text'", "test part"),
        ("(images, labels[:3]), (images, labels)", "4 samples and 3 labels"),
        ("(images, [0.5] * 4), (images, labels)", "whole number"),
        ("(images, [-1, 0, 1, 2]), (images, labels)", "negative"),
        ("(images, [[0]] * 4), (images, labels)", "shape (4, 1)"),
        ("(images.float(), labels), (images, labels)", "differ in type"),
        ("(images.int(), labels), (images, labels)", "int32"),
        ("(images[:, :2, :, :7], labels), (images, labels)", "differ in sample shape"),
        ("([object()] * 4, labels), (images, labels)", "not an array"),
        ("(images, labels), (vectors, labels)", "differ in sample shape"),
        ("(images[:0], []), (images, labels)", "train part"),
        ("Map([]), (images, labels)", "no samples"),
        ("Map([5]), (images, labels)", "(sample, label)"),
        ("(images, labels), (images, labels), ['one']", "at least 2 names"),
        ("(images, labels), (images, labels), 'ab'", "at least 2 names"),
    ],
)
def test_wrong_return_values_are_explained(tmp_path: Path, expression: str, said: str) -> None:
    assert said in refused(tmp_path, returning(expression))


def test_samples_that_differ_in_shape_are_named(tmp_path: Path) -> None:
    half = "Map([(images[0], 0), (images[1], 1), (images[2, :, :5], 0)])"
    with pytest.raises(DataError) as caught:
        loaded(tmp_path, returning(f"{half}, {half}"))
    assert "sample 2" in caught.value.screen()


def test_an_exception_in_the_function_is_shown_with_its_line(tmp_path: Path) -> None:
    screen = refused(tmp_path, "def make_dataset():\n    return 1 / 0\n")
    assert "line 5" in screen
    assert "ZeroDivisionError" in screen


def test_an_exception_during_the_import(tmp_path: Path) -> None:
    assert "No module named 'absent_thing'" in refused(tmp_path, "import absent_thing\ndef make_dataset(): pass\n")


def test_a_required_unknown_argument_is_explained(tmp_path: Path) -> None:
    assert "colour" in refused(tmp_path, "def make_dataset(colour): pass\n")


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    written(tmp_path / "my_package", returning("(images, labels), (images, labels)"), "sets.py")
    check_dataset_name("my_package.sets:make_dataset")
    data = load_dataset(DataConfig(dataset="my_package.sets:make_dataset"), 0)
    assert data.info.name == "my_package.sets:make_dataset"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{folder}/absent.py:make_dataset", "no such file"),
        ("{folder}/mine.py:make_datasets", "make_dataset ?"),
        ("{folder}/mine.py:", "FILE.py:FUNCTION"),
        ("{folder}/mine.py:a b", "FILE.py:FUNCTION"),
        ("{folder}/broken.py:f", "not valid Python"),
        ("absent_package.module:f", "no module"),
        ("json.absent:f", "no module"),
        ("json:no_such", "'no_such'"),
        ("..:f", "no module"),
        (":f", "FILE.py:FUNCTION"),
    ],
)
def test_names_are_checked_without_executing_code(tmp_path: Path, name: str, said: str) -> None:
    written(tmp_path, "raise SystemExit('ran')\ndef make_dataset(): pass\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    check_dataset_name(f"{tmp_path}/mine.py:make_dataset")
    with pytest.raises(UserError) as caught:
        check_dataset_name(name.format(folder=tmp_path))
    assert said in caught.value.screen()
