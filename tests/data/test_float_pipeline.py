"""Float images: augmented like bytes, without normalisation, and refused if bytes are needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo
from paceline.errors import UserError
from paceline.settings.schema import DataConfig
from paceline.training.export import describe_preprocessing

# Mean 0 and standard deviation 1/255 do not change the values of bytes.
BYTES = DatasetInfo("made", 8, 8, ("a", "b"), (5, 16, 16), (0.0,) * 5, (1 / 255,) * 5)
FLOATS = replace(BYTES, mean=(), std=())


@pytest.mark.parametrize("augment", ["none", "light", "gentle", "lively"])
@pytest.mark.parametrize("extras", [{}, {"cutout": 6, "erase": 0.5, "vertical_flip": True}])
def test_floats_are_augmented_like_bytes(augment: str, extras: dict[str, object]) -> None:
    config = replace(DataConfig(augment=augment), **extras)  # type: ignore[arg-type]
    samples = torch.randint(0, 256, (8, 5, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    floats, before = samples.float(), samples.float()
    for epoch in range(3):
        made = [
            build_pipeline(config, info, 7).for_training(given, torch.arange(8), epoch)
            for info, given in ((BYTES, samples), (FLOATS, floats))
        ]
        assert torch.equal(*made)
    assert torch.equal(floats, before)  # the data itself is not modified
    assert torch.equal(build_pipeline(config, FLOATS, 7).for_evaluation(floats), floats)


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(augment="imagenet"),
        DataConfig(augment="resized-crop"),
        DataConfig(policy="trivial"),
        DataConfig(color_jitter=0.1),
    ],
)
def test_operations_that_need_bytes_are_refused(config: DataConfig) -> None:
    with pytest.raises(UserError, match="uint8"):
        build_pipeline(config, FLOATS, 0)
    if config.augment == "light":
        with pytest.raises(UserError, match="1 or 3 channels"):
            build_pipeline(config, BYTES, 0)
    else:
        assert build_pipeline(config, BYTES, 0).input_shape == (5, 224, 224)


def test_preprocessing_of_other_channels_is_described() -> None:
    floats = describe_preprocessing(build_pipeline(DataConfig(), FLOATS, 0))
    assert (floats["kind"], floats["input_shape"]) == ("array", [5, 16, 16])
    described = describe_preprocessing(build_pipeline(DataConfig(), BYTES, 0))
    assert described["channel_order"] == "as in the training data"
    assert not any("RGB" in step for step in described["steps"])
