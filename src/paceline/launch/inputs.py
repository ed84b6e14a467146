"""Data and weights that a job reads must be here before it is submitted: compute nodes often have no internet."""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.data.known_files import missing_files
from paceline.errors import DataError
from paceline.models.external import is_fetched, is_of_collection
from paceline.models.published import PUBLISHED, published_path
from paceline.settings.load import LoadedConfig
from paceline.settings.recipe_file import shipped_recipes


def require_inputs(loaded: LoadedConfig, *, brings_own_weights: bool = False) -> None:
    """DataError unless they are. A job in a container has another home folder: its weights are its own."""
    config = loaded.config
    data_dir = Path(config.data.data_dir)
    if missing := missing_files(config.data.dataset, data_dir):
        raise DataError(
            f"{config.data.dataset} is not on this machine, and compute nodes may have no internet",
            where=str(data_dir.absolute()),
            got=f"no {', '.join(missing)}",
            hint=fetch_command(loaded),
        )
    is_published = config.model.weights == "imagenet" or is_of_collection(config.model.weights)
    if is_published and not brings_own_weights:
        _require_weights(loaded)


def _require_weights(loaded: LoadedConfig) -> None:
    model = loaded.config.model
    name = model.weights if is_of_collection(model.weights) else model.model_name
    where = str(published_path(name)) if name in PUBLISHED else None
    is_there = published_path(name).is_file() if name in PUBLISHED else is_fetched(name)
    if is_there is False:
        raise DataError(
            f"the ImageNet weights of {name} are not on this machine, and compute nodes may have no internet",
            where=where,
            got="no such file" if where else "nothing in the folder where the collection keeps its downloads",
            hint=f"{fetch_command(loaded, weights=True)}\nor --weights PATH, or --weights none",
        )


def fetch_command(loaded: LoadedConfig, *, weights: bool = False) -> str:
    """The command that brings what is missing."""
    is_shipped = shipped_recipes().get(loaded.recipe_path.stem) == loaded.recipe_path
    words = ["paceline", "data", "fetch", loaded.recipe_path.stem if is_shipped else str(loaded.recipe_path)]
    words += ["--weights"] if weights else []
    flags = ("model_name",) if weights else ("dataset", "data_dir")
    for flag in flags:
        if loaded.origin(flag) == "flag":
            value = getattr(loaded.config.model if flag == "model_name" else loaded.config.data, flag)
            words += [f"--{flag.replace('_', '-')}", value]
    return shlex.join(words)
