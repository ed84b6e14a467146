"""Generated data sets have a memory limit. It is checked before memory is allocated."""

from __future__ import annotations

import pytest

from paceline.data.registry import check_data_config
from paceline.errors import UserError
from paceline.settings.load import load_config
from paceline.settings.schema import DataConfig

TOO_LARGE = {
    "test samples count too": {"dataset": "synthetic", "num_samples": 1, "input_size": "60000000"},
    "test images count too": {"dataset": "synthetic", "num_samples": 1, "input_size": "3x9000x9000"},
    "centres of classes": {"dataset": "synthetic", "num_samples": 1, "input_size": "60000", "num_classes": 4096},
    "shapes": {"dataset": "shapes", "num_samples": 2**62},
    "synthetic": {"dataset": "synthetic", "num_samples": 2**62, "input_size": "1"},
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_too_large(case: str) -> None:
    with pytest.raises(UserError, match="too large") as caught:
        check_data_config(DataConfig(**TOO_LARGE[case]))  # type: ignore[arg-type]
    assert caught.value.hint is not None


@pytest.mark.parametrize("dataset", ["synthetic", "shapes"])
def test_the_number_in_the_hint_is_accepted(dataset: str) -> None:
    with pytest.raises(UserError) as caught:
        check_data_config(DataConfig(dataset=dataset, num_samples=2**40))
    assert caught.value.hint is not None
    most = int(caught.value.hint.split()[1])
    check_data_config(DataConfig(dataset=dataset, num_samples=most))
    with pytest.raises(UserError):
        check_data_config(DataConfig(dataset=dataset, num_samples=most + 2))


@pytest.mark.parametrize("flag", ["--num-classes", "--hidden-size"])
def test_numbers_that_decide_the_size_of_the_model_have_a_limit(flag: str) -> None:
    with pytest.raises(UserError, match="out of range"):
        load_config("synthetic-mlp", [f"{flag}=10000000"])
