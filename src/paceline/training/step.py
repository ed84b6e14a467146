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
from paceline.parallel.exact import LaneReducer
from paceline.training.optim import MovingAverage
from paceline.world.detect import World
from paceline.world.seeds import seed_step


@dataclass(frozen=True)
class StepReport:
    """Of this rank's samples, on the device."""

    sums: Tensor  # float64, a row per lane run here: loss summed over samples, correct answers, samples
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
        lanes = config.parallel.lanes or world.world_size
        self._reducer = LaneReducer(model.module, world, lanes) if config.parallel.exact else None
        is_half = model.autocast_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=is_half)

    @property
    def lanes_per_rank(self) -> int:
        """How many parts a rank runs its share of the batch in."""
        return self._reducer.lanes_per_rank if self._reducer else 1

    def __call__(self, batch: Batch, step: int, lr: float, *, want_norm: bool) -> StepReport:
        config = self._config
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        sums = self._run_lanes(batch, step) if self._reducer else self._run_share(batch, step)
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

    def _run_share(self, batch: Batch, step: int) -> Tensor:
        """The rank's whole share at once; the strategy sums gradients over ranks."""
        seed_step(self._config.train.seed, step, self._world.rank)
        return self._accumulate_gradients(batch.inputs, batch.labels, weight=1.0)[None]

    def _run_lanes(self, batch: Batch, step: int) -> Tensor:
        """Lane by lane, as if each were a rank; the reducer sums them in its tree."""
        assert self._reducer is not None
        lanes = self._reducer.lanes_per_rank
        first = self._world.rank * lanes
        self._reducer.begin_step()
        rows = []
        parts = zip(batch.inputs.chunk(lanes), batch.labels.chunk(lanes), strict=True)
        for lane, (inputs, labels) in enumerate(parts, start=first):
            seed_step(self._config.train.seed, step, lane)
            self._reducer.begin_lane()
            rows.append(self._accumulate_gradients(inputs, labels, weight=1 / (lanes * self._world.world_size)))
            self._reducer.end_lane()
        self._reducer.end_step()
        return torch.stack(rows)

    def _accumulate_gradients(self, inputs: Tensor, labels: Tensor, *, weight: float) -> Tensor:
        """Forward and backward, microbatch by microbatch; `weight` is this part's share of the mean."""
        accumulate = self._config.train.accumulate
        sums = torch.zeros(3, dtype=torch.float64, device=labels.device)
        parts = zip(inputs.chunk(accumulate), labels.chunk(accumulate), strict=True)
        for number, (part, answers) in enumerate(parts, start=1):
            self._model.reduce_gradients(number == accumulate)
            with autocast(self._model, self._world):
                logits = self._model(part)
                loss = F.cross_entropy(logits.float(), answers, label_smoothing=self._config.optim.label_smoothing)
            self.scaler.scale(loss * (weight / accumulate)).backward()
            with torch.no_grad():
                correct = (logits.argmax(1) == answers).sum()
                count = len(answers)
                sums += torch.stack([loss.double() * count, correct.double(), correct.new_tensor(count).double()])
        return sums


def autocast(model: ParallelModel, world: World) -> AbstractContextManager[object]:
    """Mixed precision for a forward pass. Under FSDP the shards' own policy does the casting."""
    if model.autocast_dtype is None or model.strategy == "fsdp":
        return nullcontext()
    return torch.autocast(torch.device(world.device).type, model.autocast_dtype)
