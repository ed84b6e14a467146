"""`--resolution-schedule`, `--test-size` and `--repeat-augment`: valid values, and one screen for all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline
from paceline.errors import UserError
from paceline.settings.load import load_config
from paceline.settings.resolution import evaluation_size, largest_size, parse_schedule, training_sizes
from paceline.settings.rules import check_config
from paceline.settings.schema import DataConfig

GOOD = ("--augment=resized-crop", "--model-name=resnet18", "--epochs=20")


def test_a_schedule_is_read() -> None:
    assert parse_schedule("") == ()
    assert parse_schedule("0:128,10:160, 16 : 192") == ((0, 128), (10, 160), (16, 192))


@pytest.mark.parametrize(
    "text", ["128", "0:128,", "0:128;10:160", "0:12x", "1:128", "0:128,0:160", "0:128,9:160,5:192", "0:4", "0:9999"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_schedule(text)


def test_sizes_are_derived_from_the_settings() -> None:
    config = DataConfig(image_size=96, resolution_schedule="0:64,4:128", test_size=112)
    assert (training_sizes(config), evaluation_size(config), largest_size(config)) == (((0, 64), (4, 128)), 112, 128)
    plain = DataConfig(image_size=96)
    assert (training_sizes(plain), evaluation_size(plain), largest_size(plain)) == (((0, 96),), 96, 96)


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (("--resolution-schedule=2:64,4:128",), "resolution-schedule"),
        (("--resolution-schedule=0:64,20:128",), "resolution-schedule"),
        (("--resolution-schedule=0:64,4:128", "--augment=light"), "resolution-schedule"),
        (("--test-size=96", "--augment=none"), "test-size"),
        (("--test-size=4096",), "test-size"),
        (("--resolution-schedule=0:64,4:128", "--model-name=cnn"), "resolution-schedule"),
        (("--test-size=96", "--model-name=mlp"), "test-size"),
        (("--resolution-schedule=0:64,4:128", "--cutout=80"), "cutout"),
        (("--repeat-augment=3", "--global-batch-size=64"), "repeat-augment"),
        (("--repeat-augment=64", "--global-batch-size=64"), "repeat-augment"),
        (("--repeat-augment=0",), "repeat-augment"),
    ],
)
def test_incompatible_settings_are_refused_by_name(flags: tuple[str, ...], where: str) -> None:
    with pytest.raises(UserError) as error:
        check_config(load_config("shapes-cnn", [*GOOD, *flags]))
    assert where in (error.value.where or "")


def test_compatible_resolution_settings_are_accepted() -> None:
    flags = ["--resolution-schedule=0:64,19:128", "--test-size=160", "--repeat-augment=4", "--global-batch-size=64"]
    check_config(load_config("shapes-cnn", [*GOOD, *flags]))


def test_a_wrong_schedule_starts_no_run(tmp_path: Path) -> None:
    answer = paceline("train", "shapes-cnn", *GOOD, "--resolution-schedule=3:64", cwd=tmp_path)
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []
