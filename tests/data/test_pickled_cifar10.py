"""torchvision's `cifar-10-batches-py`: the same data as the binary files, and nothing in a file is executed."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.pickled_cifar10 import FORMS, official_batch, pickle_batch, pickle_binary_folder
from harness.shared_data import real_cifar10
from paceline.data.check import check_known
from paceline.data.dataset import LoadedData
from paceline.data.fingerprint import fingerprint_of
from paceline.data.known_files import CIFAR10_PICKLED_FOLDER
from paceline.data.registry import load_dataset
from paceline.data.sources import cifar10
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

RECORDS = 30
PIXELS = np.random.default_rng(5).integers(0, 256, (6, RECORDS, 3072), dtype=np.uint8)
LABELS = [[(number + record) % 10 for record in range(RECORDS)] for number in range(6)]


def load(data_dir: Path) -> LoadedData:
    return load_dataset(DataConfig(dataset="cifar10", data_dir=str(data_dir)), 0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(cifar10, "ARCHIVE_URL", "http://127.0.0.1:1/cifar-10-binary.tar.gz")
    if "shared" not in request.keywords:
        monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", RECORDS)


def write_pickled(folder: Path, form: str = "official") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(cifar10.PICKLED_FILES):
        (folder / name).write_bytes(pickle_batch(LABELS[number], PIXELS[number], form))
    return folder


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(cifar10.FILES):
        labels = np.array(LABELS[number], np.uint8)
        (folder / name).write_bytes(np.column_stack([labels, PIXELS[number]]).tobytes())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", ["", "cifar-10-batches-py"])
def test_the_same_data_as_in_the_binary_files(form: str, given: str, tmp_path: Path) -> None:
    """Every pixel and label in the same order, in all forms. The identity is the same, so that runs can resume."""
    write_binary(tmp_path / "binary" / cifar10.FOLDER)
    write_pickled(tmp_path / "pickled" / CIFAR10_PICKLED_FOLDER, form)
    assert_equal(load(tmp_path / "binary"), load(tmp_path / "pickled" / given))


def assert_equal(binary: LoadedData, pickled: LoadedData) -> None:
    for one, other in ((binary.train, pickled.train), (binary.test, pickled.test)):
        everything = torch.arange(len(one))
        assert one.read(everything).equal(other.read(everything))
        assert one.labels.equal(other.labels)
    assert fingerprint_of(binary) == fingerprint_of(pickled)


def test_the_official_form_is_readable_by_python() -> None:
    """Python's own unpickler reads the generated files as torchvision does."""
    batch = pickle.loads(pickle_batch(LABELS[0], PIXELS[0]), encoding="latin1")
    assert batch["labels"] == LABELS[0]
    assert np.array_equal(batch["data"], PIXELS[0])
    assert len(batch["filenames"]) == RECORDS


class Command:
    """Executes a command when Python's own unpickler opens it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def hostile_files(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}".encode()
    quoted = command.decode()
    return {
        "instead of the batch": pickle.dumps(Command(marker)),
        "protocol 0": pickle.dumps(Command(marker), protocol=0),
        "instead of the pixels": pickle.dumps({"labels": LABELS[0], "data": Command(marker)}),
        "beside the data": pickle.dumps({"labels": LABELS[0], "data": PIXELS[0], "more": Command(marker)}),
        "as a label": pickle.dumps({"labels": [Command(marker), *LABELS[0][1:]], "data": PIXELS[0]}),
        "builtins": b"\x80\x02cbuiltins\neval\nX" + _long(f"__import__('os').system('{quoted}')") + b"\x85R.",
        "python 2's name": b"\x80\x02c__builtin__\neval\nX" + _long(f"__import__('os').system('{quoted}')") + b"\x85R.",
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nX" + _long(quoted) + b"o.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(X" + _long(quoted) + b"t\x81.",
        "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x14ctypeslib.ctypes.CDLL\x93X" + _long("libc.so.6") + b"\x85R.",
        "numpy's own loader": b"\x80\x02cnumpy\nload\nX" + _long(str(marker)) + b"\x85R.",
        "an array of objects": pickle.dumps({"labels": LABELS[0], "data": np.array([Command(marker)] * RECORDS)}),
    }


def _long(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


@pytest.mark.parametrize("case", list(hostile_files(Path("x"))))
def test_a_hostile_file_is_refused_and_not_executed(case: str, tmp_path: Path) -> None:
    """A file that contains a call gives a DataError with the file's name. Its command is not executed."""
    marker = tmp_path / "executed"
    folder = write_pickled(tmp_path / CIFAR10_PICKLED_FOLDER)
    (folder / "data_batch_2").write_bytes(hostile_files(marker)[case])
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert str(folder / "data_batch_2") in str(caught.value.where)
    assert not marker.exists()


def test_the_hostile_file_of_these_tests_works_with_pickle(tmp_path: Path) -> None:
    """Python's own unpickler executes the command, so the tests above can fail."""
    marker = tmp_path / "executed"
    pickle.loads(hostile_files(marker)["beside the data"])
    assert marker.exists()


def nested(depth: int) -> bytes:
    return b"\x80\x02}(" + b"X\x04\x00\x00\x00data" + b")" + b"\x85" * depth + b"K\x01u."


def doubled(times: int) -> bytes:
    """A list of two lists of two lists ...: 2**times elements if it is printed or compared."""
    layers = b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(times))
    return b"\x80\x02]q\x00" + layers + b"]\x93."  # used as a function name


LIES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "no pickle": lambda: b"<html>sign in</html>",
    "cut in the pixels": lambda: pickle_batch(LABELS[1], PIXELS[1])[:40_000],
    "without its end": lambda: pickle_batch(LABELS[1], PIXELS[1])[:-1],
    "fewer pictures": lambda: pickle_batch(LABELS[1][:-1], PIXELS[1][:-1]),
    "more pictures": lambda: pickle_batch([*LABELS[1], 1], np.concatenate([PIXELS[1], PIXELS[0][:1]])),
    "fewer labels": lambda: pickle_batch(LABELS[1][:-1], PIXELS[1]),
    "a label of 10": lambda: pickle_batch([10, *LABELS[1][1:]], PIXELS[1]),
    "a label of 300": lambda: pickle_batch([300, *LABELS[1][1:]], PIXELS[1]),
    "a negative label": lambda: pickle.dumps({"labels": [-1, *LABELS[1][1:]], "data": PIXELS[1]}),
    "a label that is False": lambda: pickle.dumps({"labels": [False, *LABELS[1][1:]], "data": PIXELS[1]}),
    "labels of text": lambda: pickle.dumps({"labels": ["cat"] * RECORDS, "data": PIXELS[1]}),
    "no labels": lambda: pickle.dumps({"data": PIXELS[1]}),
    "CIFAR-100": lambda: pickle.dumps({"fine_labels": LABELS[1], "data": PIXELS[1]}),
    "a list": lambda: pickle.dumps([LABELS[1], PIXELS[1]]),
    "other numbers": lambda: pickle.dumps({"labels": LABELS[1], "data": PIXELS[1].astype(np.int8)}),
    "other shape": lambda: pickle.dumps({"labels": LABELS[1], "data": PIXELS[1].reshape(-1, 3, 1024)}),
    "by column": lambda: pickle.dumps({"labels": LABELS[1], "data": np.asfortranarray(PIXELS[1])}),
    "a shape without its bytes": lambda: official_batch(LABELS[1], PIXELS[1], []).replace(
        b"T" + PIXELS[1].nbytes.to_bytes(4, "little"), b"T" + (PIXELS[1].nbytes - 5).to_bytes(4, "little")
    ),
    "deep": lambda: nested(50_000),
    "doubled": lambda: doubled(40),
    "far memory": lambda: b"\x80\x02]r\xff\xff\xff\x7f.",
    "marks only": lambda: b"\x80\x02(((.",
    "nothing to pop": lambda: b"\x80\x02R.",
    "too long": lambda: pickle_batch(LABELS[1], PIXELS[1])[:-1] + b"]" * 300_000 + b".",
}


@pytest.mark.parametrize("case", list(LIES))
def test_a_damaged_or_forged_file_is_named(case: str, tmp_path: Path) -> None:
    """Our error with the file's name. No other exception, no crash, limited memory."""
    folder = write_pickled(tmp_path / CIFAR10_PICKLED_FOLDER)
    (folder / "data_batch_2").write_bytes(LIES[case]())
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert str(folder / "data_batch_2") in str(caught.value.where)


@pytest.mark.parametrize("form", ["official", "4 text"])
def test_any_damage_gives_our_error_or_valid_data(form: str, tmp_path: Path) -> None:
    """A file that is cut or changed at random places gives a DataError, or data of the right size."""
    folder = write_pickled(tmp_path / CIFAR10_PICKLED_FOLDER, form)
    whole = (folder / "test_batch").read_bytes()
    small_parts = [place for _, _, place in pickletools.genops(whole) if place is not None]
    draw = random.Random(7)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.choice(small_parts)] = draw.randrange(256)
        (folder / "test_batch").write_bytes(damaged[: draw.choice([len(whole), draw.randrange(len(whole))])])
        with suppress(DataError):  # any other exception fails the test
            assert len(cifar10.read_pickled_records(folder / "test_batch")) == RECORDS


def test_binary_files_are_preferred_and_an_incomplete_folder_is_explained(tmp_path: Path) -> None:
    """A complete binary folder is read. For incomplete pickles the missing files are named."""
    folder = write_pickled(tmp_path / CIFAR10_PICKLED_FOLDER)
    (folder / "data_batch_4").unlink()
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert caught.value.where == str(folder)
    assert "no data_batch_4;" in str(caught.value.got)
    write_binary(tmp_path / cifar10.FOLDER)
    assert len(load(tmp_path).train) == 5 * RECORDS


@pytest.mark.shared
@pytest.mark.slow
def test_the_real_data(tmp_path: Path) -> None:
    """Real CIFAR-10 in the pickled form: the same bytes, and `data check` passes. One changed pixel is named."""
    binary = real_cifar10()
    pickled = tmp_path / CIFAR10_PICKLED_FOLDER
    pickle_binary_folder(binary / cifar10.FOLDER, pickled)
    assert_equal(load(binary), load(tmp_path))
    assert "every label and pixel" in check_known("cifar10", tmp_path).proof
    changed = bytearray((pickled / "data_batch_3").read_bytes())
    changed[len(changed) // 2] ^= 1
    (pickled / "data_batch_3").write_bytes(changed)
    with pytest.raises(DataError) as caught:
        check_known("cifar10", tmp_path)
    assert str(pickled / "data_batch_3") in str(caught.value.where)
