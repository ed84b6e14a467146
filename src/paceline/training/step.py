"""One optimizer update: microbatches, gradients, clipping, update.

Nothing here waits for the device (but fp16's loss scaling, which must look at its gradients): what a
step reports stays on the device until the loop wants to print it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from paceline.config.schema import Config
from paceline.data.loader import Batch
from paceline.parallel.apply import ParallelModel
from paceline.training.optim import MovingAverage
from paceline.world.detect import World
from paceline.world.seeds import seed_step


@dataclass(frozen=True)
class StepReport:
    """Of this rank's samples, on the device."""

    sums: Tensor  # float64 [3]: loss summed over samples, correct answers, samples
    grad_norm: Tensor | None  # over all ranks; only when asked for or clipped


class TrainStep:
    """Turns batches into updates."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        config: Config,
        world: World,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._average = average
        self._config = config
        self._world = world
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        is_half = model.autocast_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=is_half)

    def __call__(self, batch: Batch, step: int, lr: float, *, want_norm: bool) -> StepReport:
        config = self._config
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        seed_step(config.train.seed, step, self._world.rank)
        sums = self._accumulate_gradients(batch)
        norm = None
        if want_norm or config.optim.clip_norm:
            self.scaler.unscale_(self._optimizer)
            limit = config.optim.clip_norm or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, limit)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.update(step)
        return StepReport(sums, norm)

    def _accumulate_gradients(self, batch: Batch) -> Tensor:
        accumulate = self._config.train.accumulate
        sums = torch.zeros(3, dtype=torch.float64, device=batch.labels.device)
        parts = zip(batch.inputs.chunk(accumulate), batch.labels.chunk(accumulate), strict=True)
        for number, (inputs, labels) in enumerate(parts, start=1):
            self._model.reduce_gradients(number == accumulate)
            with autocast(self._model, self._world):
                logits = self._model(inputs)
                loss = F.cross_entropy(
                    logits.float(), labels, label_smoothing=self._config.optim.label_smoothing
                )
            self.scaler.scale(loss / accumulate).backward()
            with torch.no_grad():
                correct = (logits.argmax(1) == labels).sum()
                count = len(labels)
                sums += torch.stack(
                    [loss.double() * count, correct.double(), correct.new_tensor(count).double()]
                )
        return sums


def autocast(model: ParallelModel, world: World) -> AbstractContextManager[object]:
    """Mixed precision for a forward pass. Under FSDP the shards' own policy does the casting."""
    if model.autocast_dtype is None or model.strategy == "fsdp":
        return nullcontext()
    return torch.autocast(torch.device(world.device).type, model.autocast_dtype)
