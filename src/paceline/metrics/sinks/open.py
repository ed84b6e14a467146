"""Open trackers by name, with a clear error if their package is missing."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from paceline.errors import UserError
from paceline.metrics.sinks.base import Sink
from paceline.runs.folder import RunFolder

_PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def check_trackers(names: tuple[str, ...], *, where: str) -> None:
    """Raise UserError if the package of a chosen tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"the tracker {name} is not installed",
                where=where,
                hint=f"pip install 'paceline[{name}]', or leave {name} out of --track",
            )


def open_sinks(
    names: tuple[str, ...], folder: RunFolder, config: dict[str, Any], *, history: list[dict[str, Any]]
) -> list[Sink]:
    """Open every tracker whose package is installed."""
    sinks: list[Sink] = []
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            logging.getLogger("paceline").info("no %s files: pip install 'paceline[%s]'", name, name)
        elif name == "tensorboard":
            from paceline.metrics.sinks.tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(folder.tensorboard, history))
        elif name == "mlflow":
            from paceline.metrics.sinks.mlflow import MlflowSink

            sinks.append(MlflowSink(folder.path, config))
        else:
            from paceline.metrics.sinks.wandb import WandbSink

            sinks.append(WandbSink(folder.path, config))
    return sinks
