"""BatchNorm over the whole global batch.

torch's SyncBatchNorm runs on GPUs only. `CrossRankBatchNorm` does the same on CPUs, so a laptop gives the same
result as a cluster.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduce of the gradients."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class CrossRankBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm for any number of dimensions whose batch statistics cover all ranks."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs a batch and a channel dimension, got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        axes = [axis for axis in range(input.dim()) if axis != 1]
        values = input.float()
        count = values.numel() / values.shape[1]
        # Two rounds, mean first: a single pass over squares would lose precision by cancellation.
        first = torch.cat([values.sum(axes), values.new_tensor([count])])
        total: Tensor = _SumOverRanks.apply(first)  # type: ignore[no-untyped-call]
        mean = total[:-1] / total[-1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = values - mean.view(shape)
        squares: Tensor = _SumOverRanks.apply(centred.square().sum(axes))  # type: ignore[no-untyped-call]
        variance = squares / total[-1]
        self._update_running(mean.detach(), variance.detach(), float(total.detach()[-1]))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        result: Tensor = normal.to(input.dtype)
        return result

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        weight = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance * count / max(count - 1, 1), weight)


def synchronise_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace every BatchNorm by one that covers all ranks. Names and weights stay."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            replacement = CrossRankBatchNorm(
                child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
            )
            replacement.load_state_dict(child.state_dict())
            setattr(model, name, replacement.to(device))
        else:
            synchronise_batchnorm(child, device)
    return model
