"""The user's own data set: the function `FILE.py:FUNCTION` or `package.module:FUNCTION`.

It may take any of `data_dir`, `seed` and `config`. It returns the train and test parts as a pair, a triple with the
classes, or a dict, which may have a validation part too. `data/adapt.py` converts the parts. The task decides on the
labels: a class per sample, 0 or 1 for each class, or numbers.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from paceline.data.adapt import adapt_parts, parts_of
from paceline.data.dataset import DatasetInfo, LoadedData
from paceline.data.reference import resolve_reference
from paceline.errors import PacelineError, UserError, text_of
from paceline.runs.local_code import local_modules_compiled, process_kept
from paceline.settings.schema import DataConfig


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return load(config, seed).info


@lru_cache(maxsize=1)  # describe and load together call the user's function once
def load(config: DataConfig, seed: int) -> LoadedData:
    function = resolve_reference(config.dataset, where="dataset")
    returned = call_function(function, config, seed)
    try:
        given, classes = parts_of(returned)
        return adapt_parts(given, classes, config.dataset, task=config.task)
    except PacelineError as error:
        error.where = f"{config.dataset}, {error.where}" if error.where else config.dataset
        raise


def call_function(function: Callable[..., Any], config: DataConfig, seed: int) -> Any:
    """Pass the parameters that the function names. An error inside it is reported with its own line."""
    offered = {"data_dir": config.data_dir, "seed": seed, "config": config}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        wanted = offered
    else:
        wanted = {p.name: offered[p.name] for p in parameters if p.name in offered}
    unknown = [p.name for p in parameters if p.name not in wanted and _is_required(p)]
    if unknown:
        raise UserError(
            "the data set function has unknown parameters",
            where=config.dataset,
            got=", ".join(unknown),
            allowed=", ".join(offered),
        )
    try:
        with local_modules_compiled(), process_kept():
            return function(**wanted)
    except PacelineError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"the data set function {config.dataset} failed",
            where=f"{frame.filename}, line {frame.lineno}",
            got=f"{type(error).__name__}: {text_of(error)}",
        ) from error


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not variadic
