"""Import torchvision or timm for a test, or skip it with the reason.

torchvision's published wheel needs two compiled operators at import, which are missing with a CPU build of torch.
Declaring their schemas is enough for its models; the operators stay unusable. Child processes of a test get the same
through ON_CPU in their PYTHONPATH.
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
        warnings.simplefilter("ignore")  # ignore their deprecation warnings
        return importlib.import_module(name)


def import_torchvision() -> Any:
    return _import("torchvision")


def import_timm() -> Any:
    import_torchvision()  # timm imports torchvision, which needs the shim
    return _import("timm")
