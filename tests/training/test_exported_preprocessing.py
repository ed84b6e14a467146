"""The preprocessing of an export equals that of evaluation, for every pipeline that resizes."""

from __future__ import annotations

from dataclasses import replace

from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo
from paceline.settings.schema import DataConfig
from paceline.training.export import describe_preprocessing


def test_resized_crops_are_evaluated_and_exported_like_imagenet() -> None:
    info = DatasetInfo("made", 8, 8, ("a", "b"), (3, 64, 64), (0.5,) * 3, (0.2,) * 3)
    imagenet = build_pipeline(DataConfig(augment="imagenet", image_size=28), info, 0)
    crops = replace(imagenet, kind="resized-crop")
    expected = {**describe_preprocessing(imagenet), "pipeline": "resized-crop"}
    assert expected["crop"] is not None
    assert describe_preprocessing(crops) == expected
