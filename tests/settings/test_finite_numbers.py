"""Every number of a command, a recipe or a variable is finite, and an error names the allowed range."""

from __future__ import annotations

import pytest

from paceline.errors import UserError
from paceline.settings.declare import Range
from paceline.settings.load import load_config
from paceline.settings.schema import field_table
from paceline.settings.values import STORE_TIMEOUT, read_number

FLOATS = [field.flag for field in field_table().values() if field.inner is float and not field.choices]


@pytest.mark.parametrize("flag", FLOATS)
@pytest.mark.parametrize("text", ["inf", "-inf", "1e400", "nan"])
def test_infinite_numbers_are_refused(flag: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("shapes-cnn", [f"{flag}={text}"])
    assert caught.value.allowed is not None


def test_a_variable_is_finite() -> None:
    with pytest.raises(UserError):
        read_number(STORE_TIMEOUT, 1.0, {STORE_TIMEOUT: "inf"})


@pytest.mark.parametrize("flag", ["--mixup-alpha", "--cutmix-alpha"])
@pytest.mark.parametrize(
    ("text", "is_allowed"), [("0", True), ("0.001", True), ("100", True), ("1e-300", False), ("1e6", False)]
)
def test_alphas_of_mixing(flag: str, text: str, is_allowed: bool) -> None:
    if is_allowed:
        load_config("shapes-cnn", [f"{flag}={text}"])
    else:
        with pytest.raises(UserError) as caught:
            load_config("shapes-cnn", [f"{flag}={text}"])
        assert caught.value.allowed == "a number, 0 or from 0.001 up to 100"


def test_zero_next_to_an_interval() -> None:
    allowed = Range(low=1, high=2, or_zero=True)
    assert [allowed.holds(value) for value in (0, 0.5, 1, 2, 3)] == [True, False, True, True, False]
