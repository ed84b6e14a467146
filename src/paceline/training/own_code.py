"""Errors before the first step is done whose cause is a model or a loss of the user's own: not worth a restart."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

from paceline.errors import Cause, PacelineError, UserError
from paceline.models.external import first_line
from paceline.settings.schema import Config

_NO_GRADIENT = "does not require grad and does not have a grad_fn"
# What torch says of tensors that do not fit together. Other errors may have causes that a restart ends.
_DOES_NOT_FIT = re.compile(
    r"target \d+ is out of bounds|shapes cannot be multiplied|must match the size|expected input"
    r"|invalid for input of size|size mismatch|shape mismatch|expected .* to have|number of dimensions|out of range"
    r"|expected target size"
    r"|batch_size.* to match|normalized_shape|must match the existing size|given groups=",
    re.IGNORECASE,
)


def explain_own_code(error: Exception, config: Config) -> UserError | None:
    """None for an error that says nothing about functions of the user's own."""
    names = [name for name in (config.model.model_name, config.train.loss) if ":" in name]
    text = str(error)
    if not names or isinstance(error, PacelineError | OSError | torch.OutOfMemoryError):
        return None
    what = " or ".join(names)
    where = _line_of(error, names)
    if _NO_GRADIENT in text:
        return UserError(
            f"the loss of {what} has no gradient",
            where=where,
            got=first_line(error),
            allowed="a loss computed from the logits by differentiable operations (no argmax, no detach, no .item())",
            cause=Cause.USER_CODE,
        )
    if not _DOES_NOT_FIT.search(text):
        return None
    return UserError(
        f"the first step failed: {what} does not fit the data",
        where=where,
        got=first_line(error),
        allowed="a model that takes a batch of samples and returns one value per class for each of them",
        hint="does the model function use num_classes and input_shape?",
        cause=Cause.USER_CODE,
    )


def _line_of(error: Exception, names: list[str]) -> str:
    """The innermost line in a file of the user's; else the name."""
    files = {Path(name.rpartition(":")[0]).name for name in names}
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name in files]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else names[0]
