"""All models by name: `check_model_name` and `check_weights` before a run, `build_model` in the run.

The returned module maps float samples [B, *input_shape] to logits [B, num_classes]. It is built on torch's
default device. Under `torch.device("meta")` it takes no memory, and its parameters can be counted. Importing
this file does not import torch, so a mistyped name is found in a fraction of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.reference import Resolve, resolve_reference
from paceline.errors import DataError, UserError
from paceline.models.external import build_external, check_external, explained_arguments, is_of_collection, suggest
from paceline.models.published import PUBLISHED
from paceline.settings.schema import ModelConfig
from paceline.settings.syntax import parse_model_args

if TYPE_CHECKING:
    from torch import nn

PUBLISHED_NAMES = tuple(PUBLISHED)  # have ImageNet weights
VITS = ("vit-ti16", "vit-s16", "vit-b16")
BUILT_IN = ("mlp", "cnn", "sprint", "sprint-wide", *PUBLISHED_NAMES, *VITS)
VIT_ARGS = ("patch_size", "width", "depth", "heads", "mlp_ratio", "drop_path")
_ARGS_WITH_WEIGHTS = (  # of models of timm and torchvision
    *("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "cache_dir"),
    *("weights_backbone", "pretrained_backbone"),
)
OUTSIDE = "timm:NAME, torchvision:NAME, FILE.py:FUNCTION or package.module:FUNCTION"
_TIMM_TWINS = {  # with the same parameters
    "vit-ti16": "vit_tiny_patch16_224",
    "vit-s16": "vit_small_patch16_224",
    "vit-b16": "vit_base_patch16_224",
}
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt")


def check_model_name(name: str) -> None:
    """Raise a UserError if no model can be built under this name. Imports no torch."""
    if ":" in name:
        check_external(name)
    elif name not in BUILT_IN:
        hint = suggest(name, BUILT_IN)
        if name.endswith(".py"):
            hint = f"name the function that builds the model as well: {name}:build"
        raise UserError(
            "there is no model of this name",
            where="--model-name",
            got=name,
            allowed=f"{', '.join(BUILT_IN)}, {OUTSIDE}",
            hint=hint,
        )


def check_model_args(config: ModelConfig, where: str = "--model-args") -> None:
    """Raise a UserError for arguments that a built-in model does not have. Others are checked when they are built."""
    arguments, name = parse_model_args(config.model_args, where), config.model_name
    if is_of_collection(name):
        _refuse_weights_in(arguments, where)
    if ":" in name:
        return
    allowed = VIT_ARGS if name in VITS else ()
    for argument in arguments:
        if argument not in allowed:
            flag = argument.replace("_", "-") if argument in ("dropout", "hidden_size") else ""
            raise UserError(
                f"{name} has no argument {argument}",
                where=where,
                got=", ".join(config.model_args),
                allowed=", ".join(allowed) or "none",
                hint=f"--{flag} is a flag" if flag else suggest(argument, allowed),
            )


def _refuse_weights_in(arguments: dict[str, Any], where: str) -> None:
    """A run must not need the files again when its model is used, and timm may execute code that a file holds."""
    for argument in arguments:
        if argument in _ARGS_WITH_WEIGHTS:
            raise UserError(
                f"model argument {argument} names weights",
                where=where,
                got=argument,
                hint="--weights FILE, --weights imagenet or --init-from RUN",
            )


def check_weights(config: ModelConfig) -> None:
    """Raise a UserError if these weights cannot fit this model, a DataError if their file is missing."""
    name, weights = config.model_name, config.weights
    if weights == "none":
        return
    if is_of_collection(weights):
        check_external(weights, where="--weights")
        return
    if weights == "imagenet":
        if name not in PUBLISHED_NAMES and not is_of_collection(name):
            raise UserError(
                f"there are no published ImageNet weights for {name}",
                where="--weights",
                got=weights,
                allowed=f"{', '.join(PUBLISHED_NAMES)}, timm:NAME or torchvision:NAME",
                hint=f"--weights timm:{_TIMM_TWINS[name]}" if name in VITS else "use --weights none or --weights PATH",
            )
        return
    if Path(weights).suffix not in WEIGHT_SUFFIXES:
        raise UserError(
            "weights must be none, imagenet, a model of timm or torchvision, or a file of weights",
            where="--weights",
            got=weights,
            allowed=f"none, imagenet, timm:NAME, torchvision:NAME, or a path that ends in {', '.join(WEIGHT_SUFFIXES)}",
            hint=suggest(weights, ("none", "imagenet")) or "--init-from takes a run or a checkpoint",
        )
    if not Path(weights).expanduser().is_file():
        raise DataError(
            "the weights file does not exist",
            where=str(Path(weights).expanduser().absolute()),
            hint="correct --weights, or use --weights none",
        )


def build_model(
    config: ModelConfig,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    load_weights: bool = True,
    resolve: Resolve = resolve_reference,
) -> nn.Module:
    """The model for samples of `input_shape`, with initial weights or those that the config names.

    `resolve` finds a user's function: by its name in the file system, or in the source stored with a run.
    """
    name, weights = config.model_name, config.weights if load_weights else "none"
    if resolve is resolve_reference:
        check_model_name(name)
    check_model_args(config)
    if load_weights:
        check_weights(config)
    if ":" in name:
        by_collection = weights == "imagenet"
        arguments = parse_model_args(config.model_args)
        model = build_external(name, input_shape, num_classes, arguments, pretrained=by_collection, resolve=resolve)
        if by_collection:
            return model
    else:
        model = _build_built_in(config, input_shape, num_classes)
    if weights != "none":
        from paceline.models import weights as files

        files.load_weights(model, name, weights)
    return model


def _build_built_in(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    name = config.model_name
    if name == "mlp":
        from paceline.models.mlp import MLP

        return MLP(input_shape, num_classes, hidden_size=config.hidden_size, dropout=config.dropout)
    if len(input_shape) != 3:
        raise UserError(
            f"{name} needs images",
            got=f"samples of shape {input_shape}",
            hint="use --model-name mlp for vectors",
        )
    if name == "cnn":
        from paceline.models.cnn import CNN

        return CNN(input_shape, num_classes, dropout=config.dropout)
    if name.startswith("vgg"):
        from paceline.models.vgg import VGG

        return VGG(int(name.removeprefix("vgg")), input_shape, num_classes, dropout=config.dropout)
    if name in VITS:
        from paceline.models.vit import ViT

        with explained_arguments(name, config.model_args):
            return ViT(name, input_shape, num_classes, dropout=config.dropout, **parse_model_args(config.model_args))
    if name.startswith("sprint"):
        from paceline.models.sprint import Sprint

        return Sprint(name, input_shape, num_classes)
    from paceline.models.resnet import ResNet

    return ResNet(int(name.removeprefix("resnet")), input_shape, num_classes)
