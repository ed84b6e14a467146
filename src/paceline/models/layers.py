"""The parts of a model by name: blocks, layers in their order, the head, and parameters without weight decay."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from paceline.errors import UserError
from paceline.models.external import suggest
from paceline.models.head import find_head

# Of ViT, Swin and their relatives in timm and torchvision. Their position tables have two or more dimensions.
_EMBEDDINGS = ("pos_embed", "position_bias_table", "cls_token", "class_token", "dist_token", "reg_token")
_LISTED = 6


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model: the children of its sequences, not divided further."""
    for child in model.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            for part in child.children():
                if isinstance(part, nn.Sequential | nn.ModuleList):
                    yield from find_blocks(nn.ModuleList([part]))
                elif any(True for _ in part.parameters()):
                    yield part
        else:
            yield from find_blocks(child)


def number_layers(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter: 0 before the first block, then one per block; the last layer holds the head.

    Models of timm say themselves what their layers are.
    """
    names = [name for name, _ in model.named_parameters()]
    matcher: Any = getattr(model, "group_matcher", None)
    if callable(matcher):
        from timm.models import group_parameters

        found = group_parameters(model, matcher(coarse=False), reverse=True)
        return {name: int(found[name]) for name in names}
    of_module = {id(block): number for number, block in enumerate(find_blocks(nn.ModuleList([model])), start=1)}
    blocks = {name: of_module[id(module)] for name, module in model.named_modules() if id(module) in of_module}
    layers, seen = {}, 0
    for name in names:
        seen = next((blocks[prefix] for prefix in _prefixes(name) if prefix in blocks), seen)
        is_inside = any(prefix in blocks for prefix in _prefixes(name))
        layers[name] = seen if is_inside or seen < len(blocks) else len(blocks) + 1
    return layers


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def head_parameters(model: nn.Module) -> set[str]:
    """The names of the parameters of the head; empty for a model without one."""
    found = find_head(model)
    return {f"{found[0]}.{name}" for name, _ in found[1].named_parameters()} if found and found[0] else set()


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Norms, biases (both are vectors), and embeddings of positions and classes."""
    own: Any = getattr(model, "no_weight_decay", None)  # timm's convention
    named = set(own()) if callable(own) else set()
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1 or name in named or any(word in name for word in _EMBEDDINGS)
    }


def match_parameters(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """The names of parameters that a pattern matches: the parameter itself, or a module that holds it.

    UserError for a pattern that matches nothing, and for patterns that match everything.
    """
    names = [name for name, _ in model.named_parameters()]
    matched: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if _matches(name, pattern)}
        if not found:
            parts = dict.fromkeys(name.partition(".")[0] for name in names)
            raise UserError(
                "freeze matches no parameter of this model",
                where="--freeze",
                got=pattern,
                allowed=_first(list(parts)) + ", a name below them, or a pattern with * and [0-9]",
                hint=suggest(pattern, [*parts, *names]),
            )
        matched |= found
    if len(matched) == len(names):
        raise UserError(
            "freeze matches every parameter: there is nothing to train",
            where="--freeze",
            got=" ".join(patterns),
            allowed=f"some of {len(names)} parameters: {_first(names)}",
        )
    return matched


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in (*_prefixes(name), name))


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
