"""Loads initial weights from a file or from the published ImageNet weights, matched by name and shape.

Code in a file is never executed: safetensors cannot hold code, and `torch.load` runs with
`weights_only=True`. Tensors that do not fit (a head for other classes, the stem for small images) keep their
initial values and are counted in a report. If less than half of the body fits, the file is wrong and an error is
raised. The ImageNet files are torchvision's, downloaded once per node into the cache folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.data.fetch import fetch_file
from paceline.errors import DataError
from paceline.models.external import first_line, is_of_collection, published_tensors
from paceline.models.head import find_head
from paceline.models.layers import head_parameters
from paceline.models.published import published_path

PUBLISHED_AT = "https://download.pytorch.org/models"


@dataclass(frozen=True)
class LoadReport:
    """Which tensors of a file were loaded into a model."""

    loaded: tuple[str, ...]  # also those that were resized
    skipped_shape: tuple[str, ...]  # the name is in both, with different shapes
    missing: tuple[str, ...]  # only in the model
    unexpected: tuple[str, ...]  # only in the file
    resized: tuple[str, ...] = ()  # interpolated to the model's number of patches
    other_classes: tuple[str, ...] = ()  # of a head with as many classes, but others

    def summary(self) -> str:
        parts = [f"{len(self.loaded)} of {self.wanted} tensors loaded"]
        for label, names in self.parts().items():
            if names:
                parts.append(f"{label}: {_first(names)}")
        return "; ".join(parts)

    @property
    def wanted(self) -> int:
        """How many tensors the model has."""
        return len(self.loaded) + len(self.skipped_shape) + len(self.other_classes) + len(self.missing)

    def parts(self) -> dict[str, tuple[str, ...]]:
        """Everything but the tensors that were loaded as they are."""
        return {
            "resized": self.resized,
            "other shape": self.skipped_shape,
            "other classes": self.other_classes,
            "not in the file": self.missing,
            "not in the model": self.unexpected,
        }


def load_weights(model: nn.Module, model_name: str, weights: str) -> LoadReport:
    """Fill the model from `weights`: `imagenet`, a model of a collection, or the path of a file."""
    if is_of_collection(weights):
        source, tensors = weights, published_tensors(weights)
    else:
        path = fetch_imagenet(model_name) if weights == "imagenet" else Path(weights).expanduser()
        source, tensors = str(path), read_tensors(path)
    report = load_matching(model, tensors, source=source)
    logging.getLogger("paceline").info("weights of %s: %s", source.rpartition("/")[2], report.summary())
    return report


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a .safetensors, .pth or .pt file, in CPU memory."""
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path, device="cpu")
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DataError("the weights file cannot be opened", where=str(path), got=first_line(error)) from error
    except Exception as error:  # the readers raise any exception for damaged files
        raise DataError(
            "the weights file cannot be read: it is damaged, or holds more than tensors",
            where=str(path),
            got=first_line(error),
            allowed="a .safetensors file, or a .pth/.pt file of named tensors; code in a file is never run",
            hint="save it again with torch.save(model.state_dict(), PATH)",
        ) from error
    tensors = _named_tensors(content)
    if not tensors:
        raise DataError("the weights file holds no named tensors", where=str(path), got=f"a {type(content).__name__}")
    return tensors


def _named_tensors(content: object) -> dict[str, Tensor]:
    """The state dict in the usual forms: plain, inside another dict, or from a DDP model."""
    if not isinstance(content, Mapping):
        return {}
    wrapped = next((content[key] for key in ("state_dict", "model") if key in content), None)
    if isinstance(wrapped, Mapping):
        content = wrapped
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return tensors


def load_matching(
    model: nn.Module, tensors: Mapping[str, Tensor], *, source: str = "", with_head: bool = True
) -> LoadReport:
    """Copy every tensor whose name and shape match. DataError if less than half of the body matches."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    shared = [name for name in own if name in tensors]
    fitting = {name: tensors[name] for name in shared if tensors[name].shape == own[name].shape}
    others = {name: _resize_positions(model, name, tensors[name]) for name in shared if name not in fitting}
    resized = {name: value for name, value in others.items() if value is not None}
    fitting |= resized
    head = set() if with_head else head_parameters(model) & fitting.keys()
    fitting = {name: value for name, value in fitting.items() if name not in head}
    report = LoadReport(
        loaded=tuple(fitting),
        resized=tuple(resized),
        other_classes=tuple(name for name in shared if name in head),
        skipped_shape=tuple(name for name in shared if name not in fitting and name not in head),
        missing=tuple(name for name in own if name not in tensors),
        unexpected=tuple(name for name in tensors if name not in own),
    )
    body = _body_sizes(model)
    covered = sum(size for name, size in body.items() if name in fitting)
    if not fitting or 2 * covered < sum(body.values()):
        raise DataError(
            "the weights file does not belong to this model",
            where=source or None,
            got=f"{covered:,} of the {sum(body.values()):,} parameters below the head fit by name and shape\n"
            f"the model has:    {_first(tuple(own))}\nthe file has:     {_first(tuple(tensors))}\n"
            f"of another shape: {_first(report.skipped_shape)}",
            hint="check that --weights and --model-name go together",
        )
    model.load_state_dict(fitting, strict=False)
    return report


def _body_sizes(model: nn.Module) -> dict[str, int]:
    """Parameters by name, without the head: a head for other classes does not make a file wrong."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    head = find_head(model)
    prefix = f"{head[0]}." if head else ""
    return {name: size for name, size in sizes.items() if not (prefix and name.startswith(prefix))} or sizes


def _first(names: tuple[str, ...], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return (", ".join(names[:count]) or "nothing") + more


def fetch_imagenet(model_name: str) -> Path:
    """The published ImageNet weights of a built-in model, downloaded on first use."""
    path = published_path(model_name)
    try:
        return fetch_file(
            f"{PUBLISHED_AT}/{path.name}",
            path,
            checksum=path.stem.rpartition("-")[2],
            algorithm="sha256",
            what=f"the ImageNet weights of {model_name}",
        )
    except DataError as error:
        other_ways = "or use your own file (--weights PATH), or start from random weights (--weights none)"
        error.hint = f"{error.hint}\n{other_ways}" if error.hint else other_ways
        raise


def _resize_positions(model: nn.Module, name: str, saved: Tensor) -> Tensor | None:
    """Saved position embeddings [1, prefix + patches, width], interpolated to the model's grid of patches.

    For our own vision transformers and timm's. None for any other tensor, or if it does not fit.
    """
    parts: Any = model
    grid = getattr(getattr(parts, "patch_embed", None), "grid_size", None)
    prefix = getattr(parts, "num_prefix_tokens", None)
    own = getattr(parts, name, None)
    if name != "pos_embed" or grid is None or prefix is None or not isinstance(own, Tensor):
        return None
    if saved.ndim != 3 or own.ndim != 3 or saved.shape[2] != own.shape[2] or own.shape[1] != prefix + math.prod(grid):
        return None
    side = math.isqrt(saved.shape[1] - prefix) if saved.shape[1] > prefix else 0
    if side * side != saved.shape[1] - prefix or not side:
        return None  # a grid that is not square does not follow from its number of patches
    tokens, patches = saved.float().tensor_split([prefix], dim=1)
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(square, size=tuple(grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([tokens, resized.flatten(2).transpose(1, 2)], dim=1).to(saved.dtype)
