"""Vision transformers ViT-Ti/16, S/16 and B/16 (Dosovitskiy et al., 2021), with a class token.

Parameters have the names and shapes of timm's models, so weights can be exchanged in both directions. Attention is
torch's fused kernel. Dropout and drop path are drawn per sample (models/dropout.py). Initialisation: truncated normal
of 0.02 for linear layers and positions, of sqrt(1 / inputs) for the patches, zero for biases and the class token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.models.dropout import SampleDropout, SampleDropPath


class Size(NamedTuple):
    width: int
    depth: int
    heads: int


SIZES = {"vit-ti16": Size(192, 12, 3), "vit-s16": Size(384, 12, 6), "vit-b16": Size(768, 12, 12)}
_EPS = 1e-6
_STD = 0.02


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, grid_size: tuple[int, int], patch_size: int, width: int) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.proj = nn.Conv2d(channels, width, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.proj_drop = SampleDropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(x).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(samples, tokens, width)
        out: Tensor = self.proj_drop(self.proj(mixed))
        return out


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.drop1 = SampleDropout(dropout)
        self.fc2 = nn.Linear(hidden, width)
        self.drop2 = SampleDropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop2(self.fc2(self.drop1(F.gelu(self.fc1(x)))))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = Attention(width, heads, dropout)
        self.drop_path1 = SampleDropPath(drop_path)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = Mlp(width, hidden, dropout)
        self.drop_path2 = SampleDropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        out: Tensor = x + self.drop_path2(self.mlp(self.norm2(x)))
        return out


class ViT(nn.Module):
    num_prefix_tokens = 1  # the class token

    def __init__(
        self,
        name: str,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        dropout: float = 0.0,
        patch_size: int = 16,
        width: int = 0,
        depth: int = 0,
        heads: int = 0,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
    ) -> None:
        """`drop_path` is the rate of the last block; the rates rise linearly from 0. Sizes of 0: those of the name."""
        super().__init__()
        size = SIZES[name]
        width, depth, heads = width or size.width, depth or size.depth, heads or size.heads
        channels, *sides = input_shape
        _check_sizes(name, sides, patch_size, width, heads, drop_path)
        if depth < 1 or mlp_ratio <= 0:
            got = f"depth {depth}, mlp_ratio {mlp_ratio}"
            raise UserError(f"{name} has no such size", where="--model-args", got=got, allowed="numbers above 0")
        grid_size = sides[0] // patch_size, sides[1] // patch_size
        self.input_shape = input_shape
        self.patch_embed = PatchEmbed(channels, grid_size, patch_size, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_prefix_tokens + math.prod(grid_size), width))
        hidden = round(width * mlp_ratio)
        rates = [drop_path * number / max(depth - 1, 1) for number in range(depth)]
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, dropout, rate) for rate in rates))
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.head = nn.Linear(width, num_classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.input_shape:
            raise ValueError(f"this model expects samples of shape {self.input_shape}, got {tuple(x.shape[1:])}")
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                inputs = module.weight[0].numel()
                nn.init.trunc_normal_(module.weight, std=_STD if isinstance(module, nn.Linear) else inputs**-0.5)
                assert module.bias is not None
                nn.init.zeros_(module.bias)


def _check_sizes(name: str, sides: list[int], patch_size: int, width: int, heads: int, drop_path: float) -> None:
    if patch_size < 1 or any(side % patch_size for side in sides):
        fitting = [size for size in (4, 8, 14, 16, 32) if not any(side % size for side in sides)]
        raise UserError(
            f"the pictures do not divide into the patches of {name}",
            got=f"{sides[0]}x{sides[1]} pixels, patches of {patch_size}x{patch_size}",
            allowed="sides that are multiples of the patch size",
            hint=f"--model-args patch_size={fitting[0]}" if fitting else "another --image-size",
        )
    if width < 1 or heads < 1 or width % heads:
        raise UserError(
            f"the width of {name} is not divisible by its attention heads",
            where="--model-args",
            got=f"width {width}, heads {heads}",
            allowed="a width that is a multiple of heads",
        )
    if not 0 <= drop_path < 1:
        raise UserError(
            "drop_path is out of range", where="--model-args", got=drop_path, allowed="from 0 to less than 1"
        )
