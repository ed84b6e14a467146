# hint: backbone-trained
# torch.no_grad() ends with its block.
"""Lesson 12: fine-tuning. Fill the gaps, then: paceline course check 12

The backbone comes from a model that was trained on ten classes, the head is new. `Net` is the model to fine-tune.
"""

from typing import Any

import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.05


class Net(nn.Module):
    """Layers from the input to the output: stem, blocks.0, blocks.1, blocks.2, head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.stem(inputs)
        for block in self.blocks:
            features = block(features)
        return self.head(features)


def load_backbone(model: nn.Module, saved: dict[str, Tensor]) -> list[str]:
    """Load every saved tensor that fits by name and shape. Returns the names of the model that got none.

    The weights were saved from a DDP wrapper: their names begin with "module.".
    """
    own = model.state_dict()
    weights = {name.removeprefix("module."): value for name, value in saved.items()}
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting]


def parameter_groups(model: nn.Module, lr: float, layer_decay: float) -> list[dict[str, Any]]:
    """One group for each parameter: its lr, and its weight_decay (0 for norms and biases, which have one dimension).

    The head has the rate `lr`. Each layer below has that of the layer above it, times `layer_decay`.
    """
    layers = ["head", "blocks.2", "blocks.1", "blocks.0", "stem"]
    groups = []
    for name, parameter in model.named_parameters():
        (depth,) = [number for number, layer in enumerate(layers) if name.startswith(layer)]
        decay = WEIGHT_DECAY if parameter.dim() > 1 else 0.0
        groups.append({"params": [parameter], "lr": lr * layer_decay**depth, "weight_decay": decay})
    return groups


def train_head(model: nn.Module) -> None:
    """Freeze everything but the head: no gradients, and BatchNorm keeps its statistics."""
    with torch.no_grad():
        model.eval()
    model.head.train()
