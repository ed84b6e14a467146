"""The files of published ImageNet weights of built-in models, by name. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from paceline.settings.values import cache_folder

PUBLISHED = {  # the eight hex digits are the beginning of the file's SHA-256
    "vgg11": "vgg11-8a719046.pth",
    "vgg16": "vgg16-397923af.pth",
    "vgg19": "vgg19-dcbb9e9d.pth",
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-0676ba61.pth",
}


def published_path(model_name: str) -> Path:
    """The path of a model's file after its download."""
    return cache_folder() / "weights" / PUBLISHED[model_name]
