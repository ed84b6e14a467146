"""Finds and replaces the head of a model: its last layer, whose outputs are the classes.

An external model has a head for the data it was made for, and needs a new one.
"""

from __future__ import annotations

from torch import nn

from paceline.errors import UserError


def find_head(model: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d] | None:
    """The name and layer of the head: the last linear layer in order of registration.

    Models without a linear layer (squeezenet) classify by a 1x1 convolution and an average over the image.
    """
    modules = list(model.named_modules())
    for name, module in reversed(modules):
        if isinstance(module, nn.Linear):
            return name, module
    for name, module in reversed(modules):
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            return name, module
    return None


def replace_head(model: nn.Module, num_classes: int, *, model_name: str) -> None:
    """Give the model a new head with `num_classes` outputs. A head that fits already is kept."""
    found = find_head(model)
    if found is None or not found[0]:
        raise UserError(
            f"{model_name} has no head that can be replaced for {num_classes} classes",
            got="a model whose last layer is neither linear nor a 1x1 convolution",
            hint="write a function that builds the model with its head, and give it as FILE.py:FUNCTION",
        )
    name, head = found
    device, dtype, bias = head.weight.device, head.weight.dtype, head.bias is not None
    fresh: nn.Module
    if isinstance(head, nn.Linear):
        if head.out_features == num_classes:
            return
        fresh = nn.Linear(head.in_features, num_classes, bias, device=device, dtype=dtype)
    else:
        if head.out_channels == num_classes:
            return
        fresh = nn.Conv2d(head.in_channels, num_classes, 1, bias=bias, device=device, dtype=dtype)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, fresh)
