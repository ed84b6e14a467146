# hint: multiplied-again
# Takes each step twice.
"""Lesson 4: DDP and FSDP. Fill the gaps, then: paceline course check 4

On a machine with GPUs a model is moved to its device. Here it is moved to another dtype: the same call, the same order.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.step()
    return loss.item()


# --- Choices under FSDP: predict first -------------------------------------------------------------------------------
#
# The check's model has 4 blocks, and a layer before and after them. Each block is one group of shards, the rest of the
# model is one more. Two ranks. The check shows your predictions beside what your ranks did; a wrong one does no harm.

BLOCKS_WHOLE_AT_ONCE = 1  # of the 4 blocks, in the forward pass, if each is dropped after its own forward pass
BYTES_PER_GATHERED_WEIGHT = 2  # if whole weights are bfloat16
GATHERS_IF_DROPPED = 9  # in one step, forward and backward; the group of the rest stays whole in between
GATHERS_IF_KEPT = 5  # in one step, if all groups stay whole between forward and backward


def choose_groups(model: nn.Module, block_type: type[nn.Module]) -> list[nn.Module]:
    """The wrapping policy: all parts of the model that are a `block_type`, however deep they lie in it."""
    return [part for part in model.modules() if isinstance(part, block_type)]


def choose_precision(is_whole_model: bool) -> MixedPrecisionPolicy:
    """The types of whole weights, of sums over ranks and (of the whole model only) of what the forward pass returns."""
    output_dtype = torch.float32 if is_whole_model else None
    return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=output_dtype)


def shard(model: nn.Module, block_type: type[nn.Module], has_room: bool) -> nn.Module:
    """Shard the model with the choices above. With room, whole weights stay until the backward pass has used them."""
    for part in choose_groups(model, block_type):
        fully_shard(part, mp_policy=choose_precision(False), reshard_after_forward=not has_room)
    fully_shard(model, mp_policy=choose_precision(True))
    return model
