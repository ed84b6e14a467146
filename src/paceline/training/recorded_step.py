"""A step of one rank on a GPU, as two CUDA graphs: everything up to the norm of the gradients, and the update.

The host checks the loss and the norm in between, as in every other step. Steps of several ranks, of --exact runs and
under fp16 (whose scaler reads values in every step) are not recorded.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import numpy
import torch
from torch import Tensor

from paceline.data.loader import Batch
from paceline.parallel.apply import ParallelModel, PlainAttributes
from paceline.runtime.detect import World
from paceline.runtime.recorded import Recorded
from paceline.settings.schema import Config
from paceline.settings.tasks import has_own_loss
from paceline.training.freezing import Freezing
from paceline.training.guards import Guards
from paceline.training.objective import Objective
from paceline.training.optim import MovingAverage
from paceline.training.step import Part, StepReport, TrainStep, cut, total_norm
from paceline.training.tally import DeviceTally


def can_record(model: ParallelModel, config: Config, world: World) -> bool:
    return (
        world.device.startswith("cuda")
        and world.world_size == 1
        and not model.is_sharded
        and model.autocast_dtype is not torch.float16
        and config.train.compile != "never"
        and not config.objective.teacher  # any model, which may read values too
        # A graph cannot read the state of torch's generators, which is kept for blocks of external models.
        and not (config.train.activation_checkpointing and ":" in config.model.model_name)
        and not has_own_loss(config)  # a user's function may read values from the GPU, which a graph cannot
        and not (config.parallel.exact or config.guard.inject or config.parallel.cpu_offload)
    )


class RecordedStep(TrainStep):
    """A TrainStep whose halves are one call to the GPU each."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        config: Config,
        world: World,
        guards: Guards,
        objective: Objective | None = None,
        freezing: Freezing | None = None,
    ) -> None:
        super().__init__(model, optimizer, average, config, world, guards, objective, freezing)
        self._record_gradients = Recorded(self._make_gradients, self._host_state)
        self._record_update = Recorded(self._apply_gradients)
        self._input_shape: torch.Size | None = None  # of the recordings; another size is recorded anew
        # Values that change from step to step are tensors on the GPU, because a graph cannot read the host.
        self._shrink, self._blend = (torch.zeros((), device=world.device) for _ in range(2))
        self._rates: dict[float, Tensor] = {}  # by factor
        for group in optimizer.param_groups:
            factor = group.get("lr_factor", 1.0)
            group["lr"] = self._rates.setdefault(factor, torch.zeros((), device=world.device))
            if "capturable" in group:
                group["capturable"] = True

    @property
    def is_recorded(self) -> bool:
        return self._record_gradients.is_recorded

    def gradients(self, batch: Batch, step: int, *, wants_stop: bool) -> StepReport:
        began = time.perf_counter()
        self._record_anew_for(batch.inputs)
        self.guards.enter("forward", step + 1)
        self.seed(step, self._world.rank)
        keys = self.keys_of(batch, step)
        rest = [tensor for tensor in (keys, batch.loss_scale) if tensor is not None]
        sums, row = self._record_gradients(batch.inputs, batch.labels, *rest)
        norm, loss = row.tolist()  # the step waits for the GPU only here
        pulse = self.guards.watchdog.pulse
        pulse.fitted = max(pulse.fitted, len(batch.labels) // self._config.train.accumulate)
        return StepReport(sums, loss, norm, wants_stop, time.perf_counter() - began)

    def update(self, step: int, lr: float, report: StepReport) -> None:
        for factor, rate in self._rates.items():
            rate.fill_(lr * factor)
        limit = self._config.optim.clip_norm
        if limit:
            self._shrink.fill_(min(1.0, limit / (report.grad_norm + 1e-6)))
        if self._average is not None:
            self._blend.fill_(self._average.weight_at(step))
        # A recorded update reads the gradients of the recorded pass. Other gradients have new addresses every step.
        (self._record_update if self._record_gradients.is_recorded else self._apply_gradients)()

    def drop(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._before)

    def warm_up(self, inputs: Tensor, labels: Tensor) -> None:
        """Compile, choose kernels and record now instead of in the first steps."""
        touched, counts = [*self._buffers, *self._trained], PlainAttributes(self._model.module)
        before = [tensor.detach().clone() for tensor in touched]
        with suppress(torch.OutOfMemoryError):  # the first step then fails with the message
            self._record_anew_for(inputs)
            keys = [torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)]
            scales = self.objective.batch_scale(labels[None])
            scale = [scales[0]] if scales is not None else []
            self._record_gradients.prepare(inputs, labels, *(keys if self._model.draws_by_sample else []), *scale)
            if self._record_gradients.is_recorded:
                self._record_update.prepare()
        with torch.no_grad():
            torch._foreach_copy_(touched, before)
            for state in self._optimizer.state.values():  # as before the first step
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            if self._average is not None:
                self._average.restart()
        counts.restore()

    def _record_anew_for(self, inputs: Tensor) -> None:
        """A CUDA graph has inputs of one shape. The recorded update reads the gradients of the recorded pass."""
        if self._input_shape not in (None, inputs.shape):
            self.forget_recordings()
        self._input_shape = inputs.shape

    def forget_recordings(self) -> None:
        self._record_gradients.forget()
        self._record_update.forget()

    def _host_state(self) -> list[Any]:
        """State on the host that a forward pass may change. If it does, the pass cannot be replayed from a graph."""
        counted = PlainAttributes(self._model.module).read()
        present = [parameter.grad is not None for parameter in self._trained]
        drawn = [random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()]
        return [counted, present, *drawn]

    def _make_gradients(self, inputs: Tensor, labels: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """`rest`: the dropout keys, if the model draws per sample, and the scale of the loss, if it has one."""
        keys = rest[0] if self._model.draws_by_sample else None
        scale = rest[-1] if len(rest) > self._model.draws_by_sample else None
        for parameter in self._trained:
            parameter.grad = None
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)
        accumulate = self._config.train.accumulate
        tally = DeviceTally(str(labels.device))
        for part in cut(Part(inputs, labels, keys, loss_scale=scale), accumulate):
            loss, correct = self._forward(part)
            tally.add(loss, correct, len(part.labels))
            (loss * part.weight).backward()
        self._drop_frozen()
        norm = total_norm(self._model.local_gradients())
        return tally.sums()[None], torch.stack([norm.float(), tally.mean_loss()])

    def _apply_gradients(self) -> None:
        if self._config.optim.clip_norm:
            torch._foreach_mul_(self._model.local_gradients(), self._shrink)
        if self._clip is not None:
            self._clip()
        self._apply_update()
        if self._average is not None:
            self._average.blend(self._blend)


def build_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    average: MovingAverage | None,
    config: Config,
    world: World,
    guards: Guards,
    objective: Objective | None = None,
    freezing: Freezing | None = None,
) -> TrainStep:
    """A recorded step where that is possible, else a plain one."""
    kind = RecordedStep if can_record(model, config, world) else TrainStep
    return kind(model, optimizer, average, config, world, guards, objective, freezing)
