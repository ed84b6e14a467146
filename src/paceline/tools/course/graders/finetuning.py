"""Lesson 12: weights of another model, a rate for each layer, and a frozen backbone."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

_LR, _DECAY, _LAYER_DECAY = 0.1, 0.05, 0.5
_CLASSES, _OLD_CLASSES = 3, 10
_HEAD = ("head.weight", "head.bias")
_LAYERS = ("head", "blocks.2", "blocks.1", "blocks.0", "stem")


# --- The weights of another model


def _trained(person: ModuleType) -> nn.Module:
    """A model of ten classes whose tensors all differ from those of a new one."""
    torch.manual_seed(1)
    model: nn.Module = person.Net(_OLD_CLASSES)
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.copy_(torch.full_like(tensor, number + 2))
    return model


def _load(person: ModuleType, rank: int, world_size: int) -> dict[str, list[str]]:
    """Names of the model: which were loaded, which changed, which were returned."""
    trained = _trained(person).state_dict()
    model = person.Net(_CLASSES)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        returned = person.load_backbone(model, {f"module.{name}": value for name, value in trained.items()})
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        return {"refused": [str(error)]}
    after = model.state_dict()
    return {
        "returned": [str(name) for name in returned],
        "loaded": [name for name in after if name not in _HEAD and torch.equal(after[name], trained[name])],
        "head": [name for name in _HEAD if not torch.equal(after[name], before[name])],
        "backbone": [name for name in after if name not in _HEAD],
    }


def check_loading(path: Path) -> None:
    found: dict[str, list[str]] = on_ranks(path, 1, _load)[0]
    if "refused" in found:
        raise Failed(
            "shapes-not-compared",
            f"load_state_dict refuses the saved head: it has {_OLD_CLASSES} classes, the new one {_CLASSES}",
            "strict=False allows missing names, not other shapes. Keep only tensors with the model's own shape.",
        )
    missing = [name for name in found["backbone"] if name not in found["loaded"]]
    if not found["loaded"]:
        raise Failed(
            "nothing-loaded",
            "no tensor of the model has a saved value",
            "The saved names begin with 'module.', so none of them fits, and strict=False hides it. Remove the prefix, "
            "and always print what was not loaded.",
        )
    if missing and all("running" in name or "num_batches" in name for name in missing):
        raise Failed(
            "statistics-not-loaded",
            f"not loaded: {', '.join(missing[:3])}, ...",
            "The running mean and variance of BatchNorm are buffers, not parameters: state_dict() has both.",
        )
    if found["head"]:
        raise Failed(
            "head-overwritten",
            f"changed: {', '.join(found['head'])}",
            "The classes of the saved head are other ones. The new head keeps its own initial values.",
        )
    if not missing and sorted(found["returned"]) == sorted(_HEAD):
        return
    if not missing:
        raise Failed(
            "wrong-names",
            f"load_backbone() returned {found['returned'][:4]}",
            f"It returns what got no saved value: {list(_HEAD)}. A person must see this list.",
        )
    raise cause_not_known(f"not loaded: {', '.join(missing)}", "every tensor of stem and blocks has its saved value.")


# --- A rate for each layer


def _group(person: ModuleType, rank: int, world_size: int) -> list[tuple[str, int, list[float], list[float]]]:
    """Of each parameter: name, dimensions, and the rates and weight decays of the groups that hold it."""
    model = person.Net(_CLASSES)
    groups: list[dict[str, Any]] = person.parameter_groups(model, _LR, _LAYER_DECAY)
    found = []
    for name, parameter in model.named_parameters():
        own = [group for group in groups if any(member is parameter for member in group["params"])]
        rates, decays = ([float(group[key]) for group in own] for key in ("lr", "weight_decay"))
        found.append((name, parameter.dim(), rates, decays))
    return found


def check_groups(path: Path) -> None:
    grouped: list[tuple[str, int, list[float], list[float]]] = on_ranks(path, 1, _group)[0]
    lost = [name for name, _, rates, _ in grouped if len(rates) != 1]
    if lost:
        raise Failed("not-one-group", f"not in exactly one group: {', '.join(lost)}", "One group for each parameter.")
    found = [(name, dimensions, rates[0], decays[0]) for name, dimensions, rates, decays in grouped]
    rates = {_layer_of(name): rate for name, _, rate, _ in found}
    _check_rates([rates[layer] for layer in _LAYERS])
    wrong = [name for name, dims, _, decay in found if abs(decay - (_DECAY if dims > 1 else 0.0)) > 1e-9]
    if not wrong:
        return
    decayed = [name for name, dims, _, decay in found if dims < 2 and decay]
    what = f"wrong weight decay: {', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''}"
    if all(decay == 0 for _, _, _, decay in found):
        raise Failed("nothing-decayed", what, "The matrices, with two dimensions or more, have WEIGHT_DECAY.")
    if decayed == wrong:
        raise Failed(
            "norms-decayed",
            what,
            "Weight decay pulls values to 0. For the scale of a norm or a bias that makes no sense: they have one "
            "dimension, whatever their name is.",
        )
    raise cause_not_known(what, "WEIGHT_DECAY for parameters with two dimensions or more, 0 for the others.")


def _layer_of(name: str) -> str:
    return next(layer for layer in _LAYERS if name.startswith(layer))


def _check_rates(rates: list[float]) -> None:
    right = [_LR * _LAYER_DECAY**depth for depth in range(len(rates))]
    if all(abs(found - wanted) < 1e-9 for found, wanted in zip(rates, right, strict=True)):
        return
    what = f"the rates from head to stem are {', '.join(f'{rate:g}' for rate in rates)}"
    if len(set(rates)) == 1:
        raise Failed("one-rate", what, "Multiply by layer_decay once for each layer between a parameter and the head.")
    if rates[0] < rates[-1]:
        raise Failed(
            "rates-upside-down",
            what,
            "The layers near the input know edges and colours, which fit any picture: they change least.",
        )
    if abs((rates[1] - rates[0]) - (rates[2] - rates[1])) < 1e-9:
        raise Failed("rates-not-powers", what, "A difference can become negative. Use a power: layer_decay ** depth.")
    raise cause_not_known(what, f"{', '.join(f'{rate:g}' for rate in right)}.")


# --- A frozen backbone


def _train(person: ModuleType, rank: int, world_size: int) -> list[str]:
    """The tensors that two steps of all ranks, each with its own samples, have changed."""
    torch.manual_seed(0)
    model = person.Net(_CLASSES)
    person.train_head(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return []
    optimizer = torch.optim.SGD(trained, lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        inputs, labels = torch.randn(8, 4, generator=generator), torch.arange(8) % _CLASSES
        nn.functional.cross_entropy(model(inputs), labels).backward()
        for parameter in trained:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
    return [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]


def check_freezing(path: Path) -> None:
    changed: list[str] = on_ranks(path, 2, _train)[0]
    backbone = [name for name in changed if name not in _HEAD]
    if any("running" not in name and "num_batches" not in name for name in backbone):
        raise Failed(
            "backbone-trained",
            f"two steps changed {', '.join(backbone[:3])}{', ...' if len(backbone) > 3 else ''}",
            "requires_grad_(False) on the whole model, then True on the head. eval() and no_grad() around something "
            "else do not freeze parameters.",
        )
    if backbone:
        raise Failed(
            "statistics-move",
            f"two steps changed {', '.join(backbone[:2])}, ...",
            "BatchNorm updates its running statistics in training mode, also without gradients. Here the backbones of "
            "the ranks even become different, since each rank sees other samples. Put the backbone into eval mode.",
        )
    if not changed:
        raise Failed("head-frozen", "two steps changed nothing", "The head must be trained: requires_grad_(True).")
    if sorted(changed) != sorted(_HEAD):
        raise cause_not_known(f"two steps changed {', '.join(changed)}", f"only {' and '.join(_HEAD)} change.")


ITEMS = (
    Item("the backbone gets all saved tensors, and the rest is named", check_loading, ("load_backbone",)),
    Item("rates fall towards the input, norms and biases have no decay", check_groups, ("parameter_groups",)),
    Item("training on 2 ranks changes the head and nothing else", check_freezing, ("train_head",)),
)
