"""Import torchvision or timm for a test, or skip it with the reason.

torchvision's published wheel looks for two compiled operators at import, which are not there beside a
CPU build of torch. Declaring their schemas is enough for its models; the operators stay unusable.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import torch

from harness.extras import need_packages


@functools.cache
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # cached for ever: the schemas go when their library goes


def _import(name: str) -> Any:
    need_packages(name)
    if torch.version.cuda is None:
        _declare_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their deprecations are not ours to fail on
        return importlib.import_module(name)


def import_torchvision() -> Any:
    return _import("torchvision")


def import_timm() -> Any:
    import_torchvision()  # timm imports it, and only _import knows how
    return _import("timm")
