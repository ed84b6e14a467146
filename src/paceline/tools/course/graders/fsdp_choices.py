"""Lesson 4, choices under FSDP: which parts are groups, and which types they use."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.sharded_step import (
    BLOCKS,
    Block,
    Stack,
    find_blocks,
    make_stack,
)
from paceline.tools.course.verdict import Failed, Item

PREDICTIONS = ("BLOCKS_WHOLE_AT_ONCE", "BYTES_PER_GATHERED_WEIGHT", "GATHERS_IF_DROPPED", "GATHERS_IF_KEPT")


# --- The wrapping policy ----------------------------------------------------------------------------------------------


def _name_groups(person: ModuleType, rank: int, world_size: int) -> dict[str, Any]:
    predictions = {name: getattr(person, name) for name in PREDICTIONS}
    model = make_stack()
    chosen = person.choose_groups(model, Block)
    if not isinstance(chosen, list):
        return {"predictions": predictions, "type": type(chosen).__name__}
    names = {id(part): name for name, part in model.named_modules()}
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    return {
        "predictions": predictions,
        "names": [names.get(id(part)) for part in chosen],
        "knows_type": list(person.choose_groups(model, nn.Linear)) == layers,
    }


def check_groups(path: Path) -> None:
    found = on_ranks(path, 1, _name_groups)[0]
    _require_numbers(found["predictions"])
    if "type" in found:
        raise Failed(
            "no-list",
            f"choose_groups returns a {found['type']}",
            "A list of parts of the model: the modules themselves, not their names and not a generator.",
        )
    require_blocks(found["names"], "choose_groups returns")
    if not found["knows_type"]:
        raise Failed(
            "block-type-ignored",
            "choose_groups(model, nn.Linear) does not return the linear layers, in the order of model.modules()",
            "The policy must fit any model: choose by isinstance(part, block_type), not by a name or a place.",
        )


def _require_numbers(predictions: dict[str, Any]) -> None:
    for name, value in predictions.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise Failed(
                "prediction-is-no-number",
                f"{name} is {value!r}",
                "Predict a whole number. It is not graded: the check shows it beside the measured one.",
            )


def require_blocks(names: list[str | None], what: str) -> None:
    """The groups must be the blocks, each once. What else was chosen shows the cause."""
    blocks = list(find_blocks(Stack()))
    inside = [name for name in names if name and any(name.startswith(f"{block}.") for block in blocks)]
    seen = f"{what} {[name if name != '' else 'the model' for name in names]}"
    if None in names:
        raise Failed(
            "not-of-the-model",
            f"{what} {names.count(None)} modules that are not parts of the model",
            "Choose from model.modules(). A copy of a part, or a new list around parts, is never called by the model.",
        )
    if "" in names:
        raise Failed(
            "model-among-its-parts",
            seen,
            "The model itself becomes a group in shard, after its parts. fully_shard accepts a module only once.",
        )
    if not names:
        raise Failed(
            "one-group",
            f"{what} no part: the model is one group",
            "The whole model is then gathered for the forward pass, and each rank needs memory for all of it. The "
            "blocks are inside stages: model.children() does not return them, model.modules() does.",
        )
    if inside and not set(blocks) & set(names):
        raise Failed(
            "group-per-layer",
            seen,
            f"Each layer is a group of its own: {len(names)} small exchanges instead of {BLOCKS} larger ones, and each "
            "costs a start. Choose by isinstance(part, block_type).",
        )
    if inside:
        raise Failed(
            "blocks-and-their-layers",
            seen,
            "If a layer inside a block is a group of its own, the block's group is without it. Choose only the blocks.",
        )
    if len(set(names)) < len(names):
        raise Failed("chosen-twice", seen, "Each part is one group, once: fully_shard refuses it the second time.")
    missed = [block for block in blocks if block not in names]
    extra = [name for name in names if name not in blocks]
    if missed and extra:
        raise Failed(
            "other-parts",
            seen,
            f"The blocks are {blocks}. A stage holds two blocks: as one group, both are whole at once.",
        )
    if missed:
        raise Failed(
            "blocks-missed",
            f"{seen}; {missed} are not there",
            "A block without a group of its own belongs to the rest of the model, which is whole all the time. The "
            "blocks lie in stages: model.modules() goes down to any depth.",
        )
    if extra:
        raise Failed(
            "more-than-blocks",
            f"{seen}; {extra} are not of block_type",
            "The layers outside of the blocks form one group together, with the model. Groups of one small layer each "
            "cost an exchange and save next to nothing.",
        )


# --- Precision --------------------------------------------------------------------------------------------------------


class _Scale(nn.Module):
    """Its gradient is its input, so each rank decides what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


def _sum_with(person: ModuleType, rank: int, world_size: int) -> dict[str, Any]:
    """The policies, and what becomes of 256 from rank 0 and 1 from rank 1 under the one for parts."""
    part, whole = person.choose_precision(False), person.choose_precision(True)
    wrong = [type(policy).__name__ for policy in (part, whole) if not isinstance(policy, MixedPrecisionPolicy)]
    if wrong:
        return {"type": wrong[0]}
    scale = _Scale()
    fully_shard(scale, mp_policy=MixedPrecisionPolicy(part.param_dtype, part.reduce_dtype))
    scale(torch.full((2,), 256.0 if rank == 0 else 1.0)).sum().backward()
    assert isinstance(scale.weight.grad, DTensor)
    return {"part": part, "whole": whole, "mean": float(scale.weight.grad.full_tensor()[0])}


def check_precision(path: Path) -> None:
    found = on_ranks(path, 2, _sum_with)[0]
    if "type" in found:
        raise Failed(
            "no-policy",
            f"choose_precision returns a {found['type']}",
            "MixedPrecisionPolicy(param_dtype=..., reduce_dtype=..., output_dtype=...), for True and for False.",
        )
    part, whole = found["part"], found["whole"]
    for policy, name in ((part, "choose_precision(False)"), (whole, "choose_precision(True)")):
        _require_types(policy, name, found["mean"])
    if part.output_dtype not in (None, torch.bfloat16):
        raise Failed(
            "float32-between-blocks",
            f"choose_precision(False) has output_dtype={part.output_dtype}",
            "A block's output is the next layer's input. The head is bfloat16 and fails with float32 inputs. "
            "Only the model as a whole returns float32.",
        )
    if whole.output_dtype is not torch.float32:
        raise Failed(
            "logits-in-bfloat16",
            f"choose_precision(True) has output_dtype={whole.output_dtype}, so the loss gets bfloat16",
            "bfloat16 has 8 significant bits: logits of 100 and 100.25 are the same number there. The loss takes "
            "differences and sums of them. Let the whole model return float32.",
        )
    if not whole.cast_forward_inputs:
        raise Failed(
            "inputs-not-cast",
            "choose_precision(True) has cast_forward_inputs=False",
            "The images are float32 and the first layer's weights bfloat16. FSDP casts inputs unless this is off.",
        )


def _require_types(policy: MixedPrecisionPolicy, name: str, mean: float) -> None:
    if policy.param_dtype is torch.float16:
        raise Failed(
            "float16-without-scaler",
            f"{name} has param_dtype=torch.float16",
            "float16 ends at 65504, and gradients below 0.00000006 become 0: it needs a loss scaler. bfloat16 has the "
            "range of float32 and the same two bytes.",
        )
    if policy.param_dtype is not torch.bfloat16:
        raise Failed(
            "gathers-in-float32",
            f"{name} has param_dtype={policy.param_dtype}: the shards' own type, four bytes or more for each weight",
            "Whole weights are copies for one pass. In bfloat16 they are half as large, to send and to hold. The "
            "shards, which the optimizer updates, stay float32.",
        )
    if policy.reduce_dtype is torch.float32:
        return
    if mean != 128.5:
        raise Failed(
            "sums-in-bfloat16",
            f"{name} has reduce_dtype={policy.reduce_dtype}. Measured: rank 0 sends 256, rank 1 sends 1, and the mean "
            f"that comes back is {mean:g}, not 128.5",
            "Without reduce_dtype gradients are summed in param_dtype. bfloat16 cannot hold 257, and with more ranks "
            "more is lost. Sum in float32.",
        )
    raise Failed(
        "sums-too-wide",
        f"{name} has reduce_dtype={policy.reduce_dtype}",
        "The sum is right, but it sends more than needed: float32 is what the shards are.",
    )


ITEMS = (
    Item("wrapping policy: each block is a group", check_groups, (*PREDICTIONS, "choose_groups")),
    Item("precision: what is gathered, summed and returned", check_precision, ("choose_precision",)),
)
