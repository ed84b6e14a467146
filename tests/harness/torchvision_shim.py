"""Import torchvision or timm for a test, or skip it with the reason.

torchvision's published wheel looks for two compiled operators at import, which are not there beside a
CPU build of torch. Declaring their schemas is enough for its models; the operators stay unusable. Processes that a test
starts get the same by ON_CPU in their PYTHONPATH.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from harness.extras import need_packages

ON_CPU = Path(__file__).with_name("torchvision_on_cpu")


def _import(name: str) -> Any:
    need_packages(name)
    importlib.import_module("harness.torchvision_on_cpu.sitecustomize")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their deprecations are not ours to fail on
        return importlib.import_module(name)


def import_torchvision() -> Any:
    return _import("torchvision")


def import_timm() -> Any:
    import_torchvision()  # timm imports it, and only _import knows how
    return _import("timm")
