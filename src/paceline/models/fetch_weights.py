"""Downloads the published weights of a model to this machine, for jobs on machines without internet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.models.external import build_external, is_of_collection
from paceline.models.published import PUBLISHED
from paceline.models.registry import check_model_name, check_weights
from paceline.settings.schema import ModelConfig

_ANY_SHAPE, _ANY_CLASSES = (3, 224, 224), 1000  # as published: the whole file is used


def fetch_weights(config: ModelConfig) -> str:
    """Download the weights and return their place as text. The user's own weights file must exist already."""
    check_model_name(config.model_name)
    if is_of_collection(config.weights):
        check_weights(config)
        build_external(config.weights, _ANY_SHAPE, _ANY_CLASSES, pretrained=True)
        return "fetched by its collection"
    if config.weights not in ("none", "imagenet"):
        check_weights(config)
        return f"{Path(config.weights).expanduser()} exists"
    check_weights(replace(config, weights="imagenet"))
    if config.model_name not in PUBLISHED:
        build_external(config.model_name, _ANY_SHAPE, _ANY_CLASSES, pretrained=True)
        return "fetched by its collection"
    from paceline.models.weights import fetch_imagenet, read_tensors

    path = fetch_imagenet(config.model_name)
    return f"{len(read_tensors(path))} tensors in {path}"
