"""One optimizer update in two halves: the gradients, which are checked, and the update.

The first half ends with three numbers on the host of every rank, the same on all: the mean loss, the norm of
the gradients, and whether any rank wants to stop. They are reduced together with the gradients, so they need no
collective of their own. A step waits for the device only once, to read them.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.data.loader import Batch
from paceline.models.dropout import ShareKeys
from paceline.parallel.apply import ParallelModel, PlainAttributes, autocast
from paceline.parallel.collectives import gather_lanes, sum_over_ranks
from paceline.parallel.digests import digest_tensors
from paceline.parallel.exact import LaneReducer
from paceline.runtime.detect import World
from paceline.runtime.seeds import seed_step
from paceline.settings.schema import Config
from paceline.settings.tasks import has_own_loss
from paceline.training.clipping import build_clipping
from paceline.training.freezing import Freezing
from paceline.training.guards import Guards
from paceline.training.objective import Objective, build_objective
from paceline.training.optim import MovingAverage, bare_step
from paceline.training.tally import DeviceSums, DeviceTally, HostSums, HostTally, Row, Rows


@dataclass(frozen=True)
class StepReport:
    """The result of a step's forward and backward pass, before any weight is changed."""

    sums: Rows  # of this rank's samples, a row per lane: loss, correct answers, samples
    mean_loss: float  # over all ranks
    grad_norm: float  # over all ranks, before clipping
    is_stop_wanted: bool  # by any rank
    busy_s: float  # this rank's own work, without waiting for other ranks
    lane_digest: Tensor | None = None  # of the gradients of this rank's audited lane


@dataclass(frozen=True)
class Part:
    """Some samples of a batch: a rank's share, a lane or a microbatch."""

    inputs: Tensor
    labels: Tensor
    keys: Tensor | None  # of the samples; dropout layers draw from them
    weight: float = 1.0  # of its mean loss in the mean that is minimised
    loss_scale: Tensor | None = None  # of the global batch: Batch.loss_scale


class TrainStep:
    """Turns batches into gradients and gradients into updates."""

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
        self.guards = guards
        self._freezing = freezing
        self._is_frozen = False  # in the current epoch
        self._clip = build_clipping(config.optim, model)
        self._model = model
        self._optimizer = optimizer
        self._average = average
        self._apply_update = bare_step(optimizer)
        self._config = config
        self._world = world
        lanes = config.parallel.lanes or world.world_size
        self._reducer = LaneReducer(model.module, world, lanes) if config.parallel.exact else None
        is_half = model.autocast_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=is_half)
        self.objective = objective or build_objective(config)
        self._has_user_code = has_own_loss(config) or ":" in config.model.model_name
        self._keys = ShareKeys(config.train.seed, world.rank, world.device) if model.draws_by_sample else None
        self._bytes_to_sum = model.bytes_to_sum()
        self._busy_s = 0.0
        self._lane_digest: Tensor | None = None
        self._audited_lane: int | None = None  # of this rank's lanes, in the current step
        # The forward pass changes running statistics. They are restored if the step is dropped.
        named = {name: value for name, value in model.module.named_parameters() if value.requires_grad}
        self._trained = list(named.values())
        if guards.faults:
            guards.faults.check_tensors(list(named))
        self._updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._buffers = list(model.module.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]

    @property
    def lanes_per_rank(self) -> int:
        """The number of lanes of this rank: it runs its share of the batch lane by lane."""
        return self._reducer.lanes_per_rank if self._reducer else 1

    @property
    def is_recorded(self) -> bool:
        """Whether steps are replayed as CUDA graphs."""
        return False

    @property
    def exchange(self) -> str:
        """How gradients are exchanged: none, shared memory, or the backend of the process group."""
        if self._world.world_size == 1:
            return "none"
        is_shared = self._reducer.is_shared if self._reducer else self._model.shared is not None
        is_short = self._config.parallel.exchange_dtype == "bf16"
        return "shared memory" if is_shared else self._world.backend + (" as bf16" if is_short else "")

    def gradients(self, batch: Batch, step: int, *, wants_stop: bool) -> StepReport:
        """Forward, backward, and the sum over ranks. Collective: the ranks also agree on a stop here."""
        self._busy_s = 0.0
        self._lane_digest = None
        self._audited_lane = batch.audit.lane if batch.audit is not None else None
        share = self.share_of(batch, step)
        if self._model.shared is None and not (self._model.is_sharded and self._world.world_size > 1):
            sums, row = self._make_gradients(share, step, wants_stop)
            return self._report(sums, row.tolist())  # the step waits for the device only here
        sums, agreed = self._sum_gradients(share, step, wants_stop)
        if self._model.shared is not None:
            self._record_waiting()
            stop, loss, missing = agreed.tolist()
            if missing:
                self._model.drop_absent()
            return StepReport(sums, loss, self._model.shared.norm, stop > 0, self._busy_s)
        # The norm of sharded gradients needs a collective anyway; the agreement is part of it.
        norm = total_norm(self._model.local_gradients())
        row = torch.cat([norm.square().to(agreed).reshape(1), agreed, self._model.shard_presence()])
        summed = sum_over_ranks(row, self._world)
        norm_squared, *agreed_values, missing = summed[: 2 + len(agreed)].tolist()
        norm_value = (norm_squared / self._model.copies) ** 0.5
        stop, loss = (value / self._world.world_size for value in agreed_values)
        if missing:
            self._model.drop_absent(summed[1 + len(agreed) :])
        self._record_waiting()
        return StepReport(sums, loss, norm_value, stop > 0, self._busy_s)

    def share_of(self, batch: Batch, step: int) -> Part:
        """This rank's share of the global batch, with the keys of its samples if the model draws by sample."""
        keys = self._keys.of(step, len(batch.labels)) if self._keys is not None else None
        return Part(batch.inputs, batch.labels, keys, loss_scale=batch.loss_scale)

    def _make_gradients(self, share: Part, step: int, wants_stop: bool | Tensor) -> tuple[Rows, Tensor]:
        """Gradients on this rank, summed over ranks. Returns the sums of this rank's samples, and the values that the
        host reads: norm, stop wanted, mean loss, and with several ranks the number of missing gradients."""
        sums, agreed = self._sum_gradients(share, step, wants_stop)
        return sums, torch.cat([total_norm(self._model.local_gradients()).to(agreed).reshape(1), agreed])

    def _sum_gradients(self, share: Part, step: int, wants_stop: bool | Tensor) -> tuple[Rows, Tensor]:
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)
        sums, agreed = (self._run_lanes if self._reducer else self._run_share)(share, step, wants_stop)
        self._drop_frozen()
        if self._model.shared is None:
            self.scaler.unscale_(self._optimizer)
        return sums, agreed

    def _report(self, sums: Rows, values: list[float]) -> StepReport:
        """The report of a step from the values of `_make_gradients`."""
        norm, stop, loss, *missing = values
        if any(missing):
            (self._reducer or self._model).drop_absent()
        self._record_waiting()
        return StepReport(sums, loss, norm, stop > 0, self._busy_s, self._lane_digest)

    def update(self, step: int, lr: float, report: StepReport) -> None:
        """Change the weights."""
        for group in self._optimizer.param_groups:
            # Rounded as a recorded step holds it: both give the same bits.
            group["lr"] = ctypes.c_float(lr * group.get("lr_factor", 1.0)).value
        limit = self._config.optim.clip_norm
        if limit and report.grad_norm > limit:
            self._model.scale_gradients(limit / (report.grad_norm + 1e-6))
        if self._clip is not None:
            self._clip()
        if self.scaler.is_enabled():
            self.scaler.step(self._optimizer)
            self.scaler.update()
        else:
            self._apply_update()
        self._clear_gradients()
        if self._average is not None:
            self._average.update(step)

    def begin_epoch(self, step: int) -> None:
        """Call before the first step of an epoch, or of a resumed one: frozen layers may be trained from here on."""
        if self._freezing is None:
            return
        is_frozen = self._freezing.holds_at(step)
        self._freezing.set_modes(self._model.module, step)
        if is_frozen != self._is_frozen:
            self._is_frozen = is_frozen
            self.forget_recordings()

    def _drop_frozen(self) -> None:
        if self._freezing is not None and self._is_frozen:
            self._freezing.drop_gradients(self._model.module)

    def drop(self) -> None:
        """Discard this step: weights and running statistics stay as they were before it."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._before)
        self.scaler.update()
        self._clear_gradients()

    def new_sums(self) -> HostSums | DeviceSums:
        """For the sums of an interval of steps."""
        lanes = self.lanes_per_rank
        return HostSums(lanes) if self._world.device == "cpu" else DeviceSums(lanes, self._world.device)

    def gather(self, sums: Tensor) -> Tensor:
        """The sums of all ranks over some steps, lane by lane in the order of ranks. Collective."""
        if self._model.shared is not None:
            return self._model.shared.gather(sums[0])  # shared gradients are used without lanes only
        return gather_lanes(sums, self._world)

    def _clear_gradients(self) -> None:
        for parameter in self._updated:  # faster than optimizer.zero_grad, which costs as much as ten small operations
            parameter.grad = None

    def warm_up(self, inputs: Tensor, labels: Tensor) -> None:
        """Do one-time work before the first step, with inputs of its shape. Weights and state do not change."""

    def enter(self, phase: str, step: int) -> None:
        self.guards.enter(phase, step)

    def seed(self, step: int, rank: int) -> None:
        """Seed the random generators. Call it before the forward pass of a rank, or of a lane."""
        seed_step(self._config.train.seed, step, rank, has_user_code=self._has_user_code)

    def forget_recordings(self) -> None:
        """Weights or optimizer state were replaced by other tensors. A recorded step refers to the old ones."""

    def _run_share(self, share: Part, step: int, wants_stop: bool | Tensor) -> tuple[Rows, Tensor]:
        """Run the rank's whole share at once. The strategy sums the gradients over ranks."""
        self.seed(step, self._world.rank)
        sums, mine = self._accumulate_gradients(share, step, wants_stop)
        if self._model.shared is not None:
            self.enter("reduce", step + 1)
            agreed = self._model.shared.average(mine)
            self._model.exposed.count(self._bytes_to_sum)
            return self._rows([sums]), agreed
        mine = mine if self._model.piggybacked_scalars is None else self._model.take_piggybacked_scalars()
        return self._rows([sums]), mine

    def _run_lanes(self, share: Part, step: int, wants_stop: bool | Tensor) -> tuple[Rows, Tensor]:
        """Run the lanes one after the other, as if each were a rank. The reducer sums them in a fixed tree."""
        assert self._reducer is not None
        lanes = self._reducer.lanes_per_rank
        first = self._world.rank * lanes
        self._reducer.begin_step()
        rows = []
        share = replace(share, weight=1 / self._world.world_size)
        for lane, part in enumerate(cut(share, lanes), start=first):
            sums, mine = self._run_lane(part, step, lane, wants_stop)
            rows.append(sums)
            if lane - first == self._audited_lane:
                self._lane_digest = self._digest_lane(mine)
            self._reducer.end_lane(mine)
        self.enter("reduce", step + 1)
        return self._rows(rows), self._reducer.end_step()

    def _run_lane(
        self, part: Part, step: int, lane: int, wants_stop: bool | Tensor, *, is_audit: bool = False
    ) -> tuple[Row, Tensor]:
        assert self._reducer is not None
        self.seed(step, lane)
        self._reducer.begin_lane()
        sums, mine = self._accumulate_gradients(part, step, wants_stop)
        if self.guards.faults:
            self.guards.faults.flip_gradients(self._model.module, step + 1, is_audit=is_audit)
        return sums, mine

    def recompute_lane(self, share: Batch, step: int, rank: int, lane: int) -> Tensor:
        """The digest of a lane of any rank, computed here from its share. Call it before the update.

        The gradients and statistics of this step stay as they are.
        """
        assert self._reducer is not None
        gradients, counts = [parameter.grad for parameter in self._trained], PlainAttributes(self._model.module)
        buffers = [buffer.clone() for buffer in self._buffers]
        keys = None
        if self._keys is not None:
            keys = ShareKeys(self._config.train.seed, rank, self._world.device).of(step, len(share.labels))
        whole = Part(share.inputs, share.labels, keys, 1 / self._world.world_size, share.loss_scale)
        lanes = self._reducer.lanes_per_rank
        _, mine = self._run_lane(cut(whole, lanes)[lane], step, rank * lanes + lane, False, is_audit=True)
        digest = self._digest_lane(mine)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        if self._buffers:
            torch._foreach_copy_(self._buffers, buffers)
        counts.restore()
        return digest

    def _digest_lane(self, mine: Tensor) -> Tensor:
        tensors = [parameter.grad for parameter in self._trained]
        return digest_tensors([*tensors, *self._buffers, mine[1:]], torch.device(self._world.device))

    def digested_names(self) -> list[str]:
        """What the numbers of a lane's digest belong to."""
        module = self._model.module
        trained = [f"the gradient of {name}" for name, value in module.named_parameters() if value.requires_grad]
        return [*trained, *(f"the buffer {name}" for name, _ in module.named_buffers()), "the loss"]

    def _accumulate_gradients(self, share: Part, step: int, wants_stop: bool | Tensor) -> tuple[Row, Tensor]:
        """Forward and backward, microbatch by microbatch.

        Returns the sums and this part's piggybacked_scalars: whether to stop, and its mean loss.
        """
        accumulate = self._config.train.accumulate
        tally = HostTally() if self._world.device == "cpu" else DeviceTally(self._world.device)
        mine = None
        for number, part in enumerate(cut(share, accumulate), start=1):
            began = time.perf_counter()
            self.enter("forward", step + 1)
            if self.guards.faults:
                self.guards.faults.check_memory(len(part.labels), step + 1)
            self._model.reduce_gradients(number == accumulate)
            loss, correct = self._forward(part)
            tally.add(loss, correct, len(part.labels))
            objective = self.scaler.scale(loss * part.weight if part.weight != 1 else loss)
            if number == accumulate:
                mine = tally.piggybacked_scalars(wants_stop)
            self._busy_s += time.perf_counter() - began
            if self._world.device == "cpu" and self._model.is_sharded:
                self._record_waiting()  # its forward pass waits for weights
            self.enter("backward", step + 1)
            self._backward(objective, mine)
            self.guards.watchdog.pulse.fitted = max(self.guards.watchdog.pulse.fitted, len(part.labels))
        assert mine is not None
        return tally.sums(), mine

    def _forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """The mean loss, and the number of correct answers."""
        with autocast(self._model, self._world):
            logits = self._model(part.inputs, part.keys)
            loss = self.objective.training_loss(logits.float(), part.labels, part.inputs, part.loss_scale)
        with torch.no_grad():
            return loss, self.objective.count_correct(logits, part.labels)

    def _backward(self, objective: Tensor, mine: Tensor | None) -> None:
        objective.backward()
        if self._model.piggybacked_scalars is not None and mine is not None:
            self._model.finish_backward(objective, mine)
            self._model.exposed.backward_is_over()
            self._model.exposed.count(self._bytes_to_sum)

    def _rows(self, lanes: list[Any]) -> Rows:
        return lanes if self._world.device == "cpu" else torch.stack(lanes)

    def _record_waiting(self) -> None:
        self.guards.phases.waited(*self._model.exposed.take())


def cut(whole: Part, parts: int) -> list[Part]:
    """Cut a batch into lanes or microbatches. Their mean losses are weighted by their samples."""
    if parts == 1:
        return [whole]
    inputs, labels = whole.inputs.tensor_split(parts), whole.labels.tensor_split(parts)
    keys = whole.keys.tensor_split(parts) if whole.keys is not None else [None] * parts
    weights = [whole.weight * (len(part) / len(whole.labels)) for part in labels]
    return list(map(Part, inputs, labels, keys, weights, [whole.loss_scale] * parts))


def total_norm(gradients: list[Tensor]) -> Tensor:
    if gradients[0].is_cuda:
        return torch.nn.utils.get_total_norm(gradients)
    if len(gradients) == 1:
        return torch.linalg.vector_norm(gradients[0])  # type: ignore[no-any-return]
    # On CPUs one call per tensor takes two thirds of the time of one for the whole list.
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    total: Tensor = torch.linalg.vector_norm(norms)
    return total
