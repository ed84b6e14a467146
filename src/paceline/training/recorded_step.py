"""A step on a GPU, as two CUDA graphs: everything up to the norm of the gradients, and the update.

The first graph has the sum over ranks in it, under DDP bucket by bucket while the backward pass goes on, and under
--exact all lanes and their tree. The host checks the loss and the norm in between, as in every other step. Sharded
models, fp16 (whose scaler reads values in every step) and ranks that exchange through gloo are not recorded.
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
from paceline.parallel.collectives import is_true_on_any
from paceline.runtime.detect import World
from paceline.runtime.recorded import Recorded, is_recording
from paceline.settings.faults import parse_faults
from paceline.settings.schema import Config
from paceline.settings.tasks import has_own_loss
from paceline.training.freezing import Freezing
from paceline.training.guards import Guards
from paceline.training.objective import Objective
from paceline.training.optim import MovingAverage
from paceline.training.step import Part, StepReport, TrainStep
from paceline.training.tally import Rows

_PLAIN_STEPS = 2  # before the recording: libraries choose kernels and workspace, and the optimizer makes its state
_PLAIN_STEPS_OF_DDP = 12  # DDP measures its first ten backward passes with events, which cannot be recorded
_FAULTS_INSIDE = ("inf-gradient", "oom", "flip")  # faults of the work itself; a recording would not repeat them
_PHASES_INSIDE = ("backward", "reduce")


def can_record(model: ParallelModel, config: Config, world: World) -> bool:
    return (
        world.device.startswith("cuda")
        and (world.world_size == 1 or world.backend == "nccl")
        and not model.is_sharded
        and not model.has_short_exchange  # its conversions are callbacks of Python
        and not (config.parallel.sync_bn and world.world_size > 1)  # not tried
        and model.autocast_dtype is not torch.float16
        and config.train.compile != "never"
        and not config.objective.teacher  # any model, which may read values too
        # A graph cannot read the state of torch's generators, which is kept for blocks of external models.
        and not (config.train.activation_checkpointing and ":" in config.model.model_name)
        and not has_own_loss(config)  # a user's function may read values from the GPU, which a graph cannot
        and not config.parallel.cpu_offload
        and not _has_faults_inside(config)
    )


def _has_faults_inside(config: Config) -> bool:
    faults = parse_faults(config.guard.inject)
    return any(fault.kind in _FAULTS_INSIDE or fault.phase in _PHASES_INSIDE for fault in faults)


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
        plain_steps = _PLAIN_STEPS if model.piggybacked_scalars is None else _PLAIN_STEPS_OF_DDP
        self._record_gradients = Recorded(self._work, self._host_state, plain_calls=plain_steps, agree=self._agree)
        self._record_update = Recorded(self._apply_gradients)
        self._input_shape: torch.Size | None = None  # of the recordings; another size is recorded anew
        self._step = 0  # of the current pass, for the parts of it that run on the host
        self._is_warming_up = False
        self._is_plain = False  # the current step is an audited one, which is not replayed
        # Values that change from step to step are tensors on the GPU, because a graph cannot read the host.
        self._stop, self._shrink, self._blend = (torch.zeros((), device=world.device) for _ in range(3))
        self._wants_stop = False  # the value of `_stop`
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
        self._is_plain = batch.audit is not None  # an audit compares the gradients of a single lane
        if self._is_plain:
            return super().gradients(batch, step, wants_stop=wants_stop)
        began = time.perf_counter()
        self._busy_s, self._lane_digest, self._audited_lane, self._step = 0.0, None, None, step
        self._record_anew_for(batch.inputs)
        super().enter("forward", step + 1)
        super().seed(step, self._last_lane)
        if wants_stop != self._wants_stop:
            self._stop.fill_(float(wants_stop))
            self._wants_stop = wants_stop
        share = self.share_of(batch, step)
        rest = [tensor for tensor in (share.keys, share.loss_scale) if tensor is not None]
        was_recorded = self.is_recorded
        sums, row = self._record_gradients(share.inputs, share.labels, *rest)
        if was_recorded:  # the host did nothing else; what overlaps inside of a recording is not measured
            self._busy_s = time.perf_counter() - began
            self._model.exposed.is_known = not self._bytes_to_sum
            self._model.exposed.count(self._bytes_to_sum)
        values = row.tolist()  # the step waits for the GPU only here
        if self._world.world_size == 1:
            self._busy_s = time.perf_counter() - began
        pulse = self.guards.watchdog.pulse
        pulse.fitted = max(pulse.fitted, len(batch.labels) // self._config.train.accumulate)
        return self._report(sums, values)

    def update(self, step: int, lr: float, report: StepReport) -> None:
        for factor, rate in self._rates.items():
            rate.fill_(lr * factor)
        limit = self._config.optim.clip_norm
        if limit:
            self._shrink.fill_(min(1.0, limit / (report.grad_norm + 1e-6)))
        if self._average is not None:
            self._blend.fill_(self._average.weight_at(step))
        # A recorded update reads the gradients of the recorded pass. Other gradients have new addresses every step.
        is_replayed = self._record_gradients.is_recorded and not self._is_plain
        (self._record_update if is_replayed else self._apply_gradients)()

    def drop(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._before)

    def warm_up(self, inputs: Tensor, labels: Tensor) -> None:
        """Compile, choose kernels and record now instead of in the first steps. Collective."""
        touched, counts = [*self._buffers, *self._trained], PlainAttributes(self._model.module)
        before = [tensor.detach().clone() for tensor in touched]
        self._is_warming_up = True
        super().seed(0, self._last_lane)
        with suppress(torch.OutOfMemoryError):  # the first step then fails with the message
            self._record_anew_for(inputs)
            keys = [torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)]
            scales = self.objective.batch_scale(labels[None])
            scale = [scales[0]] if scales is not None else []
            self._record_gradients.prepare(inputs, labels, *(keys if self._model.draws_by_sample else []), *scale)
            if self._record_gradients.is_recorded:
                self._record_update.prepare()
        self._is_warming_up = False
        with torch.no_grad():
            torch._foreach_copy_(touched, before)
            for state in self._optimizer.state.values():  # as before the first step
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            if self._average is not None:
                self._average.restart()
        counts.restore()

    def enter(self, phase: str, step: int) -> None:
        is_entered = phase == "forward" and not self._is_plain  # by `gradients`
        if not (self._is_warming_up or is_recording() or is_entered):
            super().enter(phase, step)

    def seed(self, step: int, rank: int) -> None:
        if not is_recording():
            super().seed(step, rank)

    def _record_anew_for(self, inputs: Tensor) -> None:
        """A CUDA graph has inputs of one shape. The recorded update reads the gradients of the recorded pass."""
        if self._input_shape not in (None, inputs.shape):
            self.forget_recordings()
        self._input_shape = inputs.shape

    def forget_recordings(self) -> None:
        self._record_gradients.forget()
        self._record_update.forget()

    @property
    def _last_lane(self) -> int:
        """The number of this rank's last lane; without lanes, of the rank."""
        return (self._world.rank + 1) * self.lanes_per_rank - 1

    def _agree(self, can_record: bool) -> bool:
        """Either all ranks replay a recording, or none."""
        return not is_true_on_any(not can_record, self._world)

    def _host_state(self) -> list[Any]:
        """State on the host that a forward pass may change. If it does, the pass cannot be replayed from a graph."""
        counted = PlainAttributes(self._model.module).read()
        present = [parameter.grad is not None for parameter in self._trained]
        drawn = [random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()]
        # Several lanes are seeded one by one, which a graph cannot do. The pass leaves the seed of the last one, unless
        # the model has drawn.
        drawn += [torch.cuda.get_rng_state(self._world.device).tolist()] if self.lanes_per_rank > 1 else []
        return [counted, present, *drawn]

    def _work(self, inputs: Tensor, labels: Tensor, *rest: Tensor) -> tuple[Rows, Tensor]:
        """`rest`: the dropout keys, if the model draws per sample, and the scale of the loss, if it has one."""
        keys = rest[0] if self._model.draws_by_sample else None
        scale = rest[-1] if len(rest) > self._model.draws_by_sample else None
        for parameter in self._trained:
            parameter.grad = None
        return self._make_gradients(Part(inputs, labels, keys, loss_scale=scale), self._step, self._stop)

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
