"""Applies a strategy to a complete model: single, DDP or FSDP2.

The order is: synchronised BatchNorm, memory format, compile, then the wrapper. Model code contains nothing about
distribution, and the loop uses only `ParallelModel`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.models.checks import require_logits
from paceline.models.dropout import share_keys
from paceline.parallel.batchnorm import synchronise_batchnorm
from paceline.parallel.buffers import begin_alike
from paceline.parallel.exposed import Exposed, find_last_gradient
from paceline.parallel.parts import copy_bits, local_part
from paceline.parallel.presence import PIGGYBACKED_SCALARS, Presence, UnusedParameters
from paceline.parallel.shared_gradients import SharedGradients, share_gradients
from paceline.runtime.detect import World
from paceline.settings.schema import SHARDED, Config

_NEVER = 2**31 - 1


@dataclass
class ParallelModel:
    """A model ready to train on this rank."""

    module: nn.Module  # the model itself: plain parameters, or sharded ones under fsdp
    forward: Any  # called with a batch in training: the module or its DDP wrapper
    strategy: str
    autocast_dtype: torch.dtype | None
    piggybacked_scalars: nn.Parameter | None = None  # reduced in DDP's buckets: see _WithPiggybackedScalars
    shared: SharedGradients | None = None  # replaces DDP between ranks on the CPUs of one node
    exposed: Exposed = field(default_factory=lambda: Exposed(torch.device("cpu")))
    shards_present: Callable[[], list[bool]] | None = None  # gradients made by a sharded model's last backward pass
    is_compiled: bool = False
    has_short_exchange: bool = False  # gradients are sent as bf16
    copies: int = 1  # of each shard: under hsdp one per node
    _buckets: list[Tensor] = field(default_factory=list)
    _num_in_buckets: int = 0

    def __post_init__(self) -> None:
        # Kept as a list: walking through the modules at every step takes longer than using the list.
        self._trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._unused = UnusedParameters(self._trained)
        self._presence = Presence(self._trained)
        self._present = torch.empty(0)  # of the last step, summed over ranks
        self._sample_keys = share_keys(self.module)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of every parameter."""
        return self.strategy in SHARDED

    @property
    def draws_by_sample(self) -> bool:
        """Whether layers of the model draw from their samples' keys."""
        return self._sample_keys is not None

    def set_keys(self, keys: Tensor | None) -> None:
        """Set the sample keys of the next pass. They stay until its backward pass ends, which may recompute it."""
        if self._sample_keys is not None:
            self._sample_keys.keys = keys

    def __call__(self, inputs: Tensor, keys: Tensor | None = None) -> Tensor:
        self.set_keys(keys)
        return require_logits(self.forward(inputs), len(inputs), None, type(self.module).__name__)

    def reduce_gradients(self, enabled: bool) -> None:
        """Set whether the next backward pass sums gradients over ranks. Only the last microbatch does."""
        if isinstance(self.forward, DistributedDataParallel):
            self.forward.require_backward_grad_sync = enabled
            if enabled:
                self._unused.note_gradients()
        elif self.is_sharded:
            self.forward.set_requires_gradient_sync(enabled)

    def finish_backward(self, objective: Tensor, mine: Tensor) -> None:
        """Call after the backward pass of the last microbatch under DDP. `mine`: this rank's scalars. Collective.

        Passes the scalars, this rank's presence flags, and zeros for unused parameters to DDP as gradients. This is
        done last, because only then it is known which parameters were used. DDP then finishes its sums.
        """
        assert self.piggybacked_scalars is not None
        present = self._presence.mine()
        unused = self._unused.find(objective)
        numbers = torch.cat([mine.to(present), present])
        torch.autograd.backward(
            [self.piggybacked_scalars, *unused], [numbers, *(torch.zeros_like(one) for one in unused)]
        )

    def take_piggybacked_scalars(self) -> Tensor:
        """After the last backward pass under DDP: the mean of the scalars and of the number of missing gradients."""
        assert self.piggybacked_scalars is not None
        assert self.piggybacked_scalars.grad is not None
        numbers = self.piggybacked_scalars.grad.clone()
        self.piggybacked_scalars.grad.zero_()  # it is part of a bucket and must not count in the norm of the gradients
        self.piggybacked_scalars.grad = None
        self._present = numbers[-self._presence.size :]
        return numbers[: PIGGYBACKED_SCALARS + 1]

    def shard_presence(self) -> Tensor:
        """Under FSDP: which gradients this rank's samples made, as numbers to sum over ranks."""
        assert self.shards_present is not None
        return self._presence.of(self.shards_present())

    def drop_absent(self, total: Tensor | None = None) -> None:
        """Remove the gradients of parameters that no rank used. `total`: the sum of `shard_presence`, under FSDP."""
        if self.shared is not None:
            self.shared.drop_absent()
        else:
            self._presence.drop_absent(self._present if total is None else total)

    def bytes_to_sum(self) -> int:
        """Bytes of gradients to all-reduce per step. Sharded models count their own exchanges."""
        is_summed = self.piggybacked_scalars is not None or self.shared is not None
        ranks = dist.get_world_size() if is_summed else 1
        is_short = isinstance(self.forward, DistributedDataParallel) and self.has_short_exchange
        size = sum(parameter.numel() * (2 if is_short else parameter.element_size()) for parameter in self._trained)
        return 2 * size * (ranks - 1) // ranks

    def release_gathered(self) -> None:
        """Call after a forward pass without a backward pass, so the next pass gathers the current weights."""
        if self.is_sharded:
            from paceline.parallel.sharding import reshard

            reshard(self.module)

    def local_gradients(self) -> list[Tensor]:
        """All gradients on this rank after a backward pass, as few large tensors."""
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if self.is_sharded:
            return [local_part(gradient) for gradient in gradients]
        if self.piggybacked_scalars is None:
            return gradients
        # Under DDP they are views of its buckets. The buckets do not move after DDP has arranged them.
        is_moved = not self._buckets or self._buckets[0].data_ptr() != gradients[-1].untyped_storage().data_ptr()
        if is_moved or len(gradients) != self._num_in_buckets:
            self._buckets, self._num_in_buckets = _find_buckets(gradients[::-1]), len(gradients)
        return self._buckets

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients. Collective where ranks share them."""
        if self.shared is not None:
            self.shared.scale(factor)
        else:
            torch._foreach_mul_(self.local_gradients(), factor)


def _find_buckets(gradients: list[Tensor]) -> list[Tensor]:
    one_of_each = {gradient.untyped_storage().data_ptr(): gradient for gradient in gradients}
    return [gradient.new_empty(0).set_(gradient.untyped_storage()) for gradient in one_of_each.values()]


def resolve_strategy(config: Config, world_size: int) -> str:
    if config.parallel.strategy == "auto":
        return "ddp" if world_size > 1 else "single"
    return config.parallel.strategy


def needs_group(config: Config, world: World) -> bool:
    """Whether a single rank needs a process group: shards, and a real exchange through NCCL."""
    strategy = resolve_strategy(config, world.world_size)
    return strategy in SHARDED or (strategy == "ddp" and world.backend == "nccl")


def num_shards(strategy: str, world: World) -> int:
    """The parts that each parameter is cut into."""
    if strategy not in SHARDED:
        return 1
    return world.local_world_size if strategy == "hsdp" else world.world_size


def resolve_precision(config: Config, device: str) -> torch.dtype | None:
    """The type of mixed precision, or None for full precision."""
    if not config.train.amp:
        return None
    if config.train.amp_dtype != "auto":
        return torch.bfloat16 if config.train.amp_dtype == "bf16" else torch.float16
    if not device.startswith("cuda"):
        return None  # bf16 is slower than fp32 on most CPUs
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def parallelise(model: nn.Module, config: Config, world: World, *, is_compiled: bool = False) -> ParallelModel:
    """Move a model to its device and wrap it. Only training uses the compiled model. Evaluation uses the plain model
    and so avoids a compilation for every other batch size."""
    strategy = resolve_strategy(config, world.world_size)
    dtype = resolve_precision(config, world.device)
    device = torch.device(world.device)
    model.to(device)
    if config.parallel.sync_bn and world.world_size > 1:
        model = synchronise_batchnorm(model, device)
    if strategy not in SHARDED:
        # Channels-last convolutions are faster on CPUs and tensor cores. FSDP sets the layout of its shards itself.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    forward: Any = torch.compile(model, dynamic=False) if is_compiled else model
    build = partial(ParallelModel, model, strategy=strategy, autocast_dtype=dtype, is_compiled=is_compiled)
    if strategy == "ddp" and not config.parallel.exact and (world.world_size > 1 or _is_nccl_group(world)):
        # A scaler (fp16), clipping and later unfreezing write to the gradients on every rank, which is wrong for
        # shared memory.
        optim = config.optim
        writes = dtype is torch.float16 or optim.clip_value or optim.clip_agc or optim.unfreeze_at
        can_share = not writes and not config.parallel.bucket_cap_mb and config.parallel.exchange_dtype == "auto"
        shared = share_gradients(model, world) if can_share else None
        if shared is not None:
            return build(forward=forward, shared=shared)
        begin_alike(model)
        trained = sum(parameter.requires_grad for parameter in model.parameters())
        wrapper = _WithPiggybackedScalars(model, forward, device, numbers=PIGGYBACKED_SCALARS + 1 + trained)
        forward = _wrap_ddp(wrapper, device, config.parallel.bucket_cap_mb)
        if config.parallel.exchange_dtype == "bf16":
            forward.register_comm_hook(None, lambda _, bucket: sum_as_bf16(bucket))  # torch refuses annotations
        return build(
            forward=forward,
            piggybacked_scalars=wrapper.piggybacked_scalars,
            exposed=Exposed(device),
            has_short_exchange=config.parallel.exchange_dtype == "bf16",
        )
    exposed = Exposed(device)
    if strategy in SHARDED:
        # The import takes a second, and few runs need it.
        from paceline.parallel.sharding import ShardPresence, follow_shards, mesh_of, shard

        mesh = mesh_of(strategy, world)
        forward = shard(model, mesh, dtype, config.parallel)
        follow_shards(model, exposed, mesh)
        present = ShardPresence(model).take if world.world_size > 1 else None
        copies = world.world_size // num_shards(strategy, world)
        return build(forward=forward, exposed=exposed, shards_present=present, copies=copies)
    return build(forward=forward, exposed=exposed)


def _is_nccl_group(world: World) -> bool:
    """A single GPU with `--strategy ddp` is a group of one: the exchange is real, and can be tested there."""
    return world.backend == "nccl" and dist.is_initialized()


class _WithPiggybackedScalars(nn.Module):
    """A model with a few extra scalars that DDP averages together with the gradients.

    A rank sets the "gradients" of the scalars: stop wanted, loss, which gradients it has. After the backward pass it
    reads whether any rank wants to stop, the mean loss, and which gradients exist. This saves a separate collective.
    The optimizer does not see these scalars.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[Tensor], Tensor], device: torch.device, *, numbers: int
    ) -> None:
        super().__init__()
        self.model = model
        self.piggybacked_scalars = nn.Parameter(torch.zeros(numbers, device=device))
        self._run = [run]  # in a list: a compiled model would be registered as a second submodule

    def forward(self, inputs: Tensor) -> Tensor:
        return self._run[0](inputs)


def _wrap_ddp(model: nn.Module, device: torch.device, bucket_cap_mb: int) -> DistributedDataParallel:
    # Running statistics are averaged before each evaluation, so DDP does not have to broadcast rank 0's every step.
    # torch 2.13 renamed the switch.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    device_ids = [device.index] if device.type == "cuda" else None
    # DDP also broadcasts buffers at the start, and fails for types that its backend does not support.
    ignored = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    # Gradients stay in the buckets: this saves a copy per step, and guards read a few large tensors.
    options: dict[str, Any] = {switch: False, "gradient_as_bucket_view": True, "bucket_cap_mb": bucket_cap_mb or None}
    wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
    # After its first ten steps DDP measures every n-th with events, which a recorded step cannot contain.
    wrapped._set_ddp_runtime_logging_sample_rate(_NEVER)
    return wrapped


def sum_as_bf16(bucket: Any) -> Any:
    """A communication hook of DDP: a future of the bucket's mean over ranks, sent as bf16.

    Like torch's `bf16_compress_hook`, which refuses gloo. The scalars of a step travel in a bucket too: a rounded loss
    is good enough to find one that is not finite, and the logged losses are summed in float64.
    """
    whole = bucket.buffer()
    short = whole.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(short, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: whole.copy_(short))


def settle_buckets(model: ParallelModel, example: Tensor) -> None:
    """Let DDP arrange its gradient buckets before the first real step.

    DDP does so once per process, after its first backward pass. The arrangement decides the order in which
    three or more ranks are summed. Without this, a resumed run would sum its first step in another order than the
    uninterrupted run. The pass has no side effects: gradients are dropped and running statistics are restored.
    """
    if model.piggybacked_scalars is None:
        return
    before, counts = [buffer.clone() for buffer in model.module.buffers()], PlainAttributes(model.module)
    # Use the precision of training: another one would compile the model again.
    with torch.autocast(example.device.type, model.autocast_dtype, enabled=model.autocast_dtype is not None):
        logits = model(example, torch.arange(len(example), device=example.device))
    objective = logits.float().sum() * 0.0
    last = find_last_gradient(model.module, objective.backward)
    model.finish_backward(objective, model.piggybacked_scalars.new_zeros(PIGGYBACKED_SCALARS))
    if last is not None:
        model.exposed.follow_last_gradient(last)
    model.module.zero_grad(set_to_none=True)
    model.piggybacked_scalars.grad = None
    with torch.no_grad():
        for buffer, value in zip(model.module.buffers(), before, strict=True):
            copy_bits(buffer, value)
    counts.restore()


class PlainAttributes:
    """Plain Python attributes of a model's layers, for example a counter of calls."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(model.modules())
        self._before = self.read()

    def read(self) -> list[dict[str, Any]]:
        kinds = bool | int | float | str
        return [{key: value for key, value in vars(part).items() if isinstance(value, kinds)} for part in self._layers]

    def restore(self) -> None:
        for layer, values in zip(self._layers, self._before, strict=True):
            vars(layer).update(values)


def autocast(model: ParallelModel, world: World) -> AbstractContextManager[object]:
    """Mixed precision for a forward pass. Under FSDP the shards' own policy does the casting."""
    if model.autocast_dtype is None or model.is_sharded:
        return nullcontext()
    return torch.autocast(torch.device(world.device).type, model.autocast_dtype)
