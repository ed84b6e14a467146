"""Checks before the first step that a model takes inputs of every size of the run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from paceline.errors import UserError
from paceline.models.external import first_line


def require_sizes(model: nn.Module, name: str, shapes: Iterable[tuple[int, ...]]) -> None:
    """One forward pass of one sample per shape, on the CPU. The model and the random state do not change."""
    distinct = sorted(set(shapes))
    if len(distinct) == 1:
        return
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    try:
        for shape in distinct:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                _try(model, name, shape, distinct, device)
    finally:
        model.train(was_training)


def _try(
    model: nn.Module, name: str, shape: tuple[int, ...], shapes: list[tuple[int, ...]], device: torch.device
) -> None:
    try:
        model(torch.zeros(1, *shape, device=device))
    except Exception as error:  # a model may refuse a size by any exception
        raise UserError(
            f"the model {name} does not take inputs of {shape[1]} x {shape[2]} pixels",
            where="resolution_schedule, test_size",
            got=first_line(error),
            allowed="sizes that the model takes; the run has " + ", ".join(str(other[1]) for other in shapes),
            hint="other sizes, or a model that pools before its last layer, such as resnet18",
        ) from error
