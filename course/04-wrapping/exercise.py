"""Lesson 4: DDP and FSDP. Fill the gaps, then: paceline course check 4

On a machine with GPUs a model is moved to its device. Here it is moved to another dtype: the same call, the same order.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def build(model: nn.Module, strategy: str, dtype: torch.dtype, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Move, wrap, and only then make the optimizer. `model.blocks` are the parts a large model consists of."""
    ...  # TODO: move the model to `dtype`
    if strategy == "ddp":
        ...  # TODO: whole copies that add up their gradients
    else:
        ...  # TODO: shard each block of model.blocks, then the model itself (fully_shard works in place)
    optimizer = ...  # TODO: plain SGD over the parameters the model has now
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """One step on this rank's share of the batch; returns its mean cross-entropy."""
    optimizer.zero_grad()
    loss = ...  # TODO: the mean cross-entropy of what the (wrapped) model says
    loss.backward()
    optimizer.step()
    return loss.item()


# --- Choices under FSDP: predict first -------------------------------------------------------------------------------
#
# The check's model has 4 blocks, and a layer before and after them. Each block is one group of shards, the rest of the
# model is one more. Two ranks. The check shows your predictions beside what your ranks did; a wrong one does no harm.

BLOCKS_WHOLE_AT_ONCE = ...  # TODO: of the 4 blocks, in the forward pass, if each is dropped after its own forward pass
BYTES_PER_GATHERED_WEIGHT = ...  # TODO: if whole weights are bfloat16
GATHERS_IF_DROPPED = ...  # TODO: in one step, forward and backward; the group of the rest stays whole in between
GATHERS_IF_KEPT = ...  # TODO: in one step, if all groups stay whole between forward and backward


def choose_groups(model: nn.Module, block_type: type[nn.Module]) -> list[nn.Module]:
    """The wrapping policy: all parts of the model that are a `block_type`, however deep they lie in it."""
    return ...  # TODO: not the layers inside a block, and not the model itself


def choose_precision(is_whole_model: bool) -> MixedPrecisionPolicy:
    """The types of whole weights, of sums over ranks and (of the whole model only) of what the forward pass returns."""
    return ...  # TODO: param_dtype, reduce_dtype, and output_dtype where it belongs


def shard(model: nn.Module, block_type: type[nn.Module], has_room: bool) -> nn.Module:
    """Shard the model with the choices above. With room, whole weights stay until the backward pass has used them."""
    for part in choose_groups(model, block_type):
        ...  # TODO: make it a group, with its precision and with reshard_after_forward
    ...  # TODO: make a group of the rest: FSDP keeps the outermost one whole unless reshard_after_forward is given
    return model
