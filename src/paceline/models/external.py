"""External models: from timm, from torchvision, or from a function in a file or a module.

`check_external` checks in milliseconds, without importing torch, whether a name can work.
`build_external` makes the model. A function gets those of `num_classes` and `input_shape` that it accepts, and its
model is not changed. Models of timm and torchvision get a head for the data.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.fetch import locked
from paceline.data.reference import Resolve, check_reference, resolve_reference
from paceline.errors import DataError, PacelineError, UserError, text_of
from paceline.runs.local_code import process_kept
from paceline.settings.extras import how_to_install
from paceline.settings.values import cache_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

COLLECTIONS = ("timm", "torchvision")
WHERE = "--model-name"
# As timm looks for them in a repository of the Hugging Face Hub.
_TIMM_FILES = (
    *("model.safetensors", "pytorch_model.bin"),
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
)
_RANDOM_LAYER = re.compile(r"dropout|drop_?path|stochastic_?depth|rrelu|noise", re.IGNORECASE)
_RANDOM_NAME = re.compile(r"dropout|^rand|bernoulli|multinomial|normal|uniform|gumbel|stochastic|rrelu", re.IGNORECASE)
# Built-in models draw dropout per sample (models/dropout.py). External models draw from torch's generators.
PER_RANK = (
    "dropout and other random operations of this model are drawn per rank: losses then depend on the number of ranks"
)


def suggest(name: str, known: Iterable[str]) -> str | None:
    """A hint with the known names that are similar to a mistyped one, or None."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else None


def is_of_collection(name: str) -> bool:
    """Whether a model or its weights are named as timm:NAME or torchvision:NAME."""
    return name.partition(":")[0] in COLLECTIONS


def first_line(error: BaseException) -> str:
    """An exception as one short line for an error screen."""
    lines = text_of(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")


def draws_per_rank(name: str, *, is_exact: bool) -> bool:
    """Whether a model's random operations may depend on the number of ranks. Under --exact they depend on lanes."""
    return ":" in name and not is_exact


def has_random_operations(model: nn.Module) -> bool:
    """Whether a forward pass in training may draw random numbers.

    Known layers say it by their probability. For modules of the user's own, the names in their `forward` decide.
    """
    return any(_is_random(module) for module in model.modules())


def _is_random(module: nn.Module) -> bool:
    chances = [getattr(module, name, 0) for name in ("drop_rate", "drop_prob")]
    if _RANDOM_LAYER.search(type(module).__name__) and not any(module.children()):
        chances.append(getattr(module, "p", 0 if hasattr(module, "drop_prob") else 1))
    if any(isinstance(chance, int | float) and chance > 0 for chance in chances):
        return True
    package = type(module).__module__.partition(".")[0]
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    is_own = package not in ("torch", "paceline", *COLLECTIONS)
    return is_own and code is not None and any(_RANDOM_NAME.search(name) for name in code.co_names)


# ------------------------------------------------------------------------------------- checking


def check_external(name: str, where: str = WHERE) -> None:
    """Raise a UserError unless the part before the colon exists and the part after it may exist."""
    source, _, target = name.rpartition(":")
    if source in COLLECTIONS:
        _check_collection(source, target, where)
    else:
        _check_function(name, source)


def _check_collection(collection: str, model: str, where: str) -> None:
    if not model:
        raise UserError(
            f"{collection}: names no model",
            where=where,
            got=f"{collection}:",
            allowed=f"{collection}:NAME, for example {collection}:resnet50",
        )
    if importlib.util.find_spec(collection) is None:
        raise UserError(
            f"the package {collection} is not installed",
            where=where,
            got=f"{collection}:{model}",
            hint=how_to_install(collection),
        )


def _check_function(name: str, source: str) -> None:
    try:
        check_reference(name, where=WHERE)
    except UserError as error:
        if not source.endswith(".py"):
            error.hint = suggest(source, COLLECTIONS) or error.hint
        raise


# ------------------------------------------------------------------------------------- building


def build_external(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    pretrained: bool = False,
    resolve: Resolve = resolve_reference,
) -> nn.Module:
    """Make the model. `pretrained` asks a collection for its published weights. `resolve` finds the user's function."""
    source, _, target = name.rpartition(":")
    if source not in COLLECTIONS:
        return _build_from_function(name, input_shape, num_classes, arguments or {}, resolve)
    if len(input_shape) != 3:
        raise UserError(f"{name} needs images", got=f"samples of shape {input_shape}")
    build = _build_timm if source == "timm" else _build_torchvision
    return build(target, input_shape[0], num_classes, arguments or {}, pretrained)


@contextmanager
def explained_arguments(name: str, arguments: Collection[str]) -> Iterator[None]:
    """Report arguments that a model refuses. Without arguments an error stays as it is."""
    try:
        yield
    except (TypeError, ValueError, AssertionError, AttributeError, KeyError, RuntimeError) as error:
        if not arguments:
            raise
        raise UserError(
            f"{name} cannot be built with these arguments",
            where="--model-args",
            got=f"{', '.join(arguments)}\n{first_line(error)}",
            hint="leave out what the model does not know",
        ) from error


def _build_timm(
    model: str, channels: int, num_classes: int, arguments: Mapping[str, Any], pretrained: bool
) -> nn.Module:
    timm = _import_collection("timm")
    _check_listed("timm", model, [*timm.list_models(), *timm.list_pretrained()])
    own = {"num_classes": num_classes, "in_chans": channels}
    with _fetching(f"timm:{model}", pretrained), explained_arguments(f"timm:{model}", arguments):
        built: nn.Module = timm.create_model(model, pretrained=pretrained, **own, **arguments)
    return built


def _build_torchvision(
    model: str, channels: int, num_classes: int, arguments: Mapping[str, Any], pretrained: bool
) -> nn.Module:
    from paceline.models.head import replace_head

    models = _import_collection("torchvision").models
    _check_listed("torchvision", model, models.list_models(module=models))
    if channels != 3:
        raise UserError(
            f"torchvision:{model} needs images of 3 channels",
            got=f"{channels}",
            hint="use a built-in model or timm:NAME, which adapt to the channels of the data",
        )
    with _fetching(f"torchvision:{model}", pretrained), explained_arguments(f"torchvision:{model}", arguments):
        built: nn.Module = models.get_model(model, weights="DEFAULT" if pretrained else None, **arguments)
    if getattr(built, "aux_logits", False):
        # googlenet and inception_v3 return three outputs in training unless their auxiliary heads are removed.
        for part, gone in (("aux_logits", False), ("aux1", None), ("aux2", None), ("AuxLogits", None)):
            if hasattr(built, part):
                setattr(built, part, gone)
    replace_head(built, num_classes, model_name=f"torchvision:{model}")
    return built


def _import_collection(collection: str) -> Any:
    try:
        return importlib.import_module(collection)
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise UserError(
            f"{collection} is installed but cannot be imported",
            got=first_line(error),
            hint="install compatible builds of torch and torchvision",
        ) from error


def _check_listed(collection: str, model: str, listed: list[str]) -> None:
    if model not in listed:
        raise UserError(
            f"{collection} has no model {model!r}",
            where=WHERE,
            got=f"{collection}:{model}",
            allowed=f"one of its {len(listed)} names",
            hint=suggest(model, listed),
        )


def published_classes(name: str) -> int:
    """How many classes the published weights of timm:NAME have."""
    timm = _import_collection("timm")
    model = name.rpartition(":")[2]
    _check_listed("timm", model, [*timm.list_models(), *timm.list_pretrained()])
    return int(timm.get_pretrained_cfg(model).num_classes)


def is_fetched(name: str) -> bool | None:
    """Whether the published weights of a collection's model are on this machine. None: cannot be said."""
    collection, _, model = name.rpartition(":")
    try:
        if collection == "timm":
            return _is_fetched_by_timm(model)
        weights = _import_collection("torchvision").models.get_model_weights(model).DEFAULT
        return _hub_file(weights.url).is_file()
    except Exception:  # the collections' own records differ between versions
        return None


def _is_fetched_by_timm(model: str) -> bool:
    config = _import_collection("timm").get_pretrained_cfg(model)
    if config.file:
        return Path(config.file).is_file()
    if not config.hf_hub_id:
        return _hub_file(config.url).is_file()
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = config.hf_hub_id.partition("@")
    names = [config.hf_hub_filename] if config.hf_hub_filename else _TIMM_FILES
    found = (try_to_load_from_cache(repository, file, revision=revision or None) for file in names)
    return any(isinstance(path, str) for path in found)


def _hub_file(url: str) -> Path:
    """Where torch.hub keeps a download."""
    from torch import hub

    return Path(hub.get_dir(), "checkpoints", url.rpartition("/")[2])


@contextmanager
def _fetching(name: str, pretrained: bool) -> Iterator[None]:
    """Let the ranks of a node download published weights one after the other. Any failure becomes a DataError."""
    if not pretrained:
        yield
        return
    cache = cache_folder()
    try:
        # timm and torchvision download without a lock. A rank that waited here finds the file.
        with locked(cache / "collection-weights"):
            yield
    except PacelineError:
        raise
    except Exception as error:  # each collection raises different network errors
        raise DataError(
            f"the published weights of {name} could not be loaded",
            got=first_line(error),
            hint="download them on a machine with network access, or use --weights PATH or --weights none",
        ) from error


def _build_from_function(
    name: str, input_shape: tuple[int, ...], num_classes: int, arguments: Mapping[str, Any], resolve: Resolve
) -> nn.Module:
    from torch import nn

    from paceline.models.checks import require_values

    function = resolve(name, where=WHERE)
    _require_known(name, function, arguments)
    accepted = _accepted(name, function, {"num_classes": num_classes, "input_shape": input_shape, **arguments})
    with _users_code(name):
        model = function(**accepted)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{name} does not return a model",
            where=WHERE,
            got=f"a value of type {type(model).__name__}",
            allowed="a torch.nn.Module",
        )
    require_values(model, name, where=WHERE)
    return model


def _require_known(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [key for key in parameters if key not in ("num_classes", "input_shape")]
    for argument in arguments:
        if argument not in known:
            raise UserError(
                f"{name} has no argument {argument}",
                where="--model-args",
                got=", ".join(arguments),
                allowed=", ".join(known) or "none",
                hint=suggest(argument, known),
            )


def published_tensors(name: str) -> dict[str, Tensor]:
    """The published weights of a collection's model, by name."""
    return build_external(name, (3, 224, 224), 1000, pretrained=True).state_dict()


def _accepted(name: str, function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """The offered arguments that the function accepts by keyword."""
    signature = inspect.signature(function)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    accepted = {key: value for key, value in offered.items() if takes_any or kinds.get(key) in by_keyword}
    try:
        signature.bind(**accepted)
    except TypeError as error:
        raise UserError(
            f"{name} cannot be called: {error}",
            where=WHERE,
            got=f"{getattr(function, '__name__', name)}{signature}",
            allowed="a function of num_classes and input_shape, of one of them, or without parameters",
            hint="give every other argument a default",
        ) from error
    return accepted


@contextmanager
def _users_code(name: str) -> Iterator[None]:
    """Report a failure inside a user's file with the line in that file."""
    try:
        with process_kept():
            yield
    except PacelineError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = Path(name.rpartition(":")[0]).name
        theirs = [frame for frame in frames if Path(frame.filename).name == file] or frames
        raise UserError(
            f"{name} failed while the model was built",
            where=f"{theirs[-1].filename}, line {theirs[-1].lineno}",
            got=first_line(error),
        ) from error
