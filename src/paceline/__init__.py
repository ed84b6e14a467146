"""Paceline: distributed training of vision models with one command and one answer.

The functions for Python are described in docs/guides/library.md. They are imported when they are first used, so that
`import paceline` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline import errors

if TYPE_CHECKING:
    from paceline.library.compare import Comparison, compare
    from paceline.library.epochs import STOP, Epoch
    from paceline.library.predictions import Prediction
    from paceline.library.run import Run, load_run
    from paceline.library.study import Study, study
    from paceline.library.table import Table
    from paceline.library.train import CrossValidation, cross_validate, plan, train

__version__ = "0.1.0"
__all__ = [
    "STOP",
    "Comparison",
    "CrossValidation",
    "Epoch",
    "Prediction",
    "Run",
    "Study",
    "Table",
    "compare",
    "cross_validate",
    "errors",
    "load_run",
    "plan",
    "study",
    "train",
]

_MODULES = {
    **{"Comparison": "compare", "compare": "compare"},
    **{"Epoch": "epochs", "STOP": "epochs"},
    "Prediction": "predictions",
    **{"Run": "run", "load_run": "run"},
    **{"Study": "study", "study": "study"},
    "Table": "table",
    **{"plan": "train", "train": "train", "CrossValidation": "train", "cross_validate": "train"},
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.library.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
