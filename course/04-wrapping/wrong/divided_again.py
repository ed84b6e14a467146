# hint: divided-again
# DDP has divided by the number of ranks already.
"""Lesson 4: DDP and FSDP. Fill the gaps, then: paceline course check 4

On a machine with GPUs a model is moved to its device. Here it is moved to another dtype: the same call, the same order.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def build(model: nn.Module, strategy: str, dtype: torch.dtype, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Move, wrap, and only then make the optimizer. `model.blocks` are the parts a large model consists of."""
    model = model.to(dtype)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """One step on this rank's share of the batch; returns its mean cross-entropy."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels) / 2
    loss.backward()
    optimizer.step()
    return loss.item()
