"""Instances of nn.Module as models of a run: their class, the arguments that rebuild them, and their weights.

A rank builds the model itself, from source. An instance does not know with which arguments it was built. They are read
from its attributes of the same names, as the layers of torch and most classes have them. A model that is rebuilt here
in this way must be the same in everything but its weights; otherwise the instance is refused.
"""

from __future__ import annotations

import collections
import inspect
import sys
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

_PLACES = ("device", "dtype")  # parameters of torch's layers that are not part of the architecture
_REMEDY = "give a function that returns the model: def build(num_classes): ..., then model=build"


def is_module(value: Any) -> bool:
    """Whether it is an instance of nn.Module. Does not import torch: without it there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def constructor_arguments(module: nn.Module) -> tuple[type, list[Any], dict[str, Any]]:
    """The class, and the arguments that build such a module: constants, modules, or lists of modules."""
    from torch import nn

    kind = type(module)
    children = dict(module._modules)  # named_children leaves out a layer that is used a second time
    is_numbered = list(children) == [str(number) for number in range(len(children))]
    if kind is nn.Sequential:
        return kind, list(children.values()) if is_numbered else [collections.OrderedDict(children)], {}
    if kind is nn.ModuleList:
        return kind, [list(children.values())], {}
    keywords: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in _PLACES:
            continue
        found = getattr(module, name, inspect.Parameter.empty)
        if name == "bias" and not isinstance(found, bool):  # layers have the tensor, or None
            found = found is not None and found is not inspect.Parameter.empty
        if found is not inspect.Parameter.empty:
            keywords[name] = found
        elif parameter.default is parameter.empty:
            raise _refusal(module, f"the argument {name!r} of {kind.__name__} is not known")
    return kind, [], keywords


def check_module(module: nn.Module) -> None:
    """UserError unless a module that is built from the arguments is the same, up to the weights."""
    import torch

    try:
        with torch.random.fork_rng(devices=[]):
            again = _rebuild(module)
    except UserError:
        raise
    except Exception as error:  # whatever the constructor raises
        raise _refusal(module, f"its constructor failed: {type(error).__name__}: {error}") from error
    difference = _difference(module, again)
    if difference:
        raise _refusal(module, f"{difference} is not rebuilt")


def _rebuild(value: Any) -> Any:
    if is_module(value):
        kind, arguments, keywords = constructor_arguments(value)
        return kind(*map(_rebuild, arguments), **{name: _rebuild(item) for name, item in keywords.items()})
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict((name, _rebuild(item)) for name, item in value.items())
    if isinstance(value, list):
        return [_rebuild(item) for item in value]
    return value


def _difference(module: nn.Module, again: nn.Module) -> str:
    """What differs, by name. Empty if nothing but the values of the weights does."""
    from torch import nn

    inside, own = dict(again.named_modules(remove_duplicate=False)), vars(nn.Module())
    layers = dict(module.named_modules(remove_duplicate=False))
    if layers.keys() != inside.keys():
        return "the list of its layers"
    shared = _shared_weights(module)
    if shared:
        return f"that {shared} are one tensor"
    for path, layer in layers.items():
        if layer.training != module.training:
            return f"the mode of {path} ({'train' if layer.training else 'eval'})"
        other, prefix = inside[path], f"{path}." if path else ""
        if type(layer) is not type(other):
            return f"the class of {path or 'the model'}"
        for name, value in vars(layer).items():
            if name in own:
                if "hooks" in name and value:
                    return f"{prefix}{name}"
            elif not _is_equal(value, vars(other).get(name)):
                return f"{prefix}{name}"
        for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            if _describe(tensor) != _describe(getattr(other, name, None)):
                return f"{prefix}{name}"
            is_saved = name not in layer._non_persistent_buffers_set
            if not is_saved and not _same_bits(tensor, getattr(other, name)):
                return f"the value of {prefix}{name}, a buffer that is not saved"
    return "" if module.state_dict().keys() == again.state_dict().keys() else "the list of its weights"


def _shared_weights(module: nn.Module) -> str:
    """The names of weights that are one tensor, or an empty text."""
    names: dict[int, list[str]] = collections.defaultdict(list)
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names[id(tensor)].append(name)
    return next((" and ".join(group) for group in names.values() if len(group) > 1), "")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.detach().cpu().numpy().tobytes() == other.detach().cpu().numpy().tobytes()


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError, TypeError):  # arrays and tensors have no single answer
        return False


def _describe(tensor: Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all weights and buffers, for a file. Shared weights are written twice."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in module.state_dict().items()}


def _refusal(module: nn.Module, got: str) -> UserError:
    return UserError(
        "ranks are other processes and cannot rebuild this model",
        where=f"paceline.train(model={type(module).__name__}(...))",
        got=got,
        allowed="nn.Sequential, layers of torch, and classes that keep their arguments as attributes of the same name",
        hint=_REMEDY,
    )
