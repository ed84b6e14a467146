"""Checks of a model that is not ours: its weights have values, and it returns logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.errors import Cause, UserError


def require_values(model: nn.Module, name: str, *, where: str) -> None:
    """UserError for a layer whose sizes are not known yet, or that is on the meta device."""
    only_counts = torch.empty(0).is_meta  # Paceline builds models there to count parameters
    for weight, tensor in model.state_dict(keep_vars=True).items():
        if is_lazy(tensor) or (isinstance(tensor, Tensor) and tensor.is_meta and not only_counts):
            raise UserError(
                f"the weights of {name} have no values",
                where=where,
                got=f"{weight}, " + ("a lazy parameter" if is_lazy(tensor) else "on the meta device"),
                allowed="a model whose parameters have their sizes and initial values",
                hint="give the layer its sizes: the function can have the parameters num_classes and input_shape",
                cause=Cause.USER_CODE,
            )


def require_logits(outputs: object, samples: int, num_classes: int | None, name: str) -> Tensor:
    """The outputs of a model for so many samples, if they are logits. None: the number of classes is not checked."""
    wanted = [samples, num_classes or "classes"]
    found = list(outputs.shape) if isinstance(outputs, Tensor) else None
    if isinstance(outputs, Tensor) and (num_classes is None or found == wanted):
        return outputs
    raise UserError(
        "the model returns something else than logits",
        where=name,
        got=f"a {type(outputs).__name__}" + (f" of shape {found}" if found is not None else ""),
        allowed=f"a tensor of shape [{', '.join(map(str, wanted))}]: samples, classes",
        hint="forward must return the logits, and nothing else" if found is None else None,
        cause=Cause.USER_CODE,
    )
