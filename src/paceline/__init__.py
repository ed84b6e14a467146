"""Paceline: distributed training of vision models with one command and one answer.

From Python: `paceline.train`, `paceline.plan` and `paceline.load_run` (docs/guides/library.md). They are imported when
they are first used, so that `import paceline` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline import errors

if TYPE_CHECKING:
    from paceline.library.predictions import Prediction
    from paceline.library.run import Run, load_run
    from paceline.library.table import Table
    from paceline.library.train import plan, train

__version__ = "0.1.0"
__all__ = ["Prediction", "Run", "Table", "errors", "load_run", "plan", "train"]

_HOMES = {
    "Prediction": "predictions",
    "Run": "run",
    "Table": "table",
    "load_run": "run",
    "plan": "train",
    "train": "train",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.library.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
