"""Import torchvision or timm for a test, or skip it with the reason.

torchvision's published wheel looks for two compiled operators at import, which are not there beside a
CPU build of torch. Declaring their schemas is enough for its models; the operators stay unusable.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import torch


@functools.cache
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # cached for ever: the schemas go when their library goes


def _import(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (pip install 'paceline[{name}]')")
    if torch.version.cuda is None:
        _declare_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their deprecations are not ours to fail on
        return importlib.import_module(name)


def import_torchvision() -> Any:
    return _import("torchvision")


def import_timm() -> Any:
    if importlib.util.find_spec("torchvision") is not None:
        _import("torchvision")
    return _import("timm")
