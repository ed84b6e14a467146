"""FSDP2: shards a model over all ranks, or over the ranks of each node (hsdp), and counts and times its exchanges.

Imported only by runs that shard: torch's FSDP modules take as long to load as half of torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from paceline.errors import UserError
from paceline.models.layers import find_blocks
from paceline.parallel.collectives import gather_texts
from paceline.parallel.exposed import Exposed
from paceline.runtime.detect import World
from paceline.settings.schema import ParallelConfig

_MOST_PLACES = 8  # shown in a message


def mesh_of(strategy: str, world: World) -> DeviceMesh:
    """The ranks that share a parameter: all of them, or under hsdp those of a node. Collective.

    The device is set explicitly: on a machine with GPUs, FSDP would otherwise use them even for a run on CPUs.
    """
    device = torch.device(world.device).type
    if strategy == "fsdp":
        return init_device_mesh(device, (world.world_size,))
    _require_equal_nodes(world)
    # FSDP replicates over the first dimension and shards over the second.
    names = ("replicate", "shard")
    return init_device_mesh(device, (world.num_nodes, world.local_world_size), mesh_dim_names=names)


def _require_equal_nodes(world: World) -> None:
    """Ranks are numbered node by node, and each node has equally many. Collective."""
    places = gather_texts(f"{world.local_rank} of {world.local_world_size} on {world.host}", world)
    expected = [f"{rank % world.local_world_size} of {world.local_world_size} on" for rank in range(world.world_size)]
    if not all(place.startswith(text) for place, text in zip(places, expected, strict=True)):
        raise UserError(
            "hsdp needs equally many ranks on each node, numbered node by node",
            where="--strategy hsdp",
            got="; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places[:_MOST_PLACES])),
            hint="--strategy fsdp, or the same number of ranks on every node",
        )


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None, choices: ParallelConfig) -> nn.Module:
    """Make one FSDP group per block or layer, and one for all other parameters."""
    _refuse_scalars(model)
    sums = torch.bfloat16 if choices.exchange_dtype == "bf16" else torch.float32 if dtype else None
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sums),
        "offload_policy": CPUOffloadPolicy() if choices.cpu_offload else OffloadPolicy(),
        # None: all groups except the last one, which the backward pass needs first.
        "reshard_after_forward": None if choices.reshard_after_forward else False,
    }
    for part in find_parts(model, choices.fsdp_wrap):
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def _refuse_scalars(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise UserError(
            "FSDP cannot shard a parameter without dimensions",
            where="--strategy fsdp",
            got=", ".join(scalars),
            hint="--strategy ddp, or a parameter of shape [1]: nn.Parameter(torch.ones(1))",
        )


def find_parts(model: nn.Module, wrap: str) -> list[nn.Module]:
    """The modules that become groups. The whole model is always a group, too."""
    if wrap == "model":
        return []
    if wrap == "blocks":
        return list(find_blocks(model))
    return list(_find_layers(model))


def _find_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with their own parameters. They may use their children without calling them."""
    for child in model.children():
        if any(True for _ in child.parameters(recurse=False)):
            yield child
        else:
            yield from _find_layers(child)


def reshard(model: nn.Module) -> None:
    """Release weights that are still gathered. A gathered group does not see new values of its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def follow_shards(model: nn.Module, exposed: Exposed, mesh: DeviceMesh) -> None:
    """Count and, on CPUs, time every exchange of a sharded model. The sums over nodes under hsdp are not timed."""
    copies = mesh.size(0) if mesh.ndim > 1 else 1
    exposed.is_known = mesh.device_type != "cuda" and copies == 1
    gather, scatter = _TimedAllGather(exposed), _TimedReduceScatter(exposed, copies)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)


class _TimedAllGather(DefaultAllGather):
    def __init__(self, exposed: Exposed) -> None:
        self._exposed = exposed

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self._exposed.exchanged(began, output_tensor.nbytes - input_tensor.nbytes)
        return work


class _TimedReduceScatter(DefaultReduceScatter):
    def __init__(self, exposed: Exposed, copies: int) -> None:
        self._exposed = exposed
        self._copies = copies  # of each shard, which are then summed

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        between_copies = 2 * output_tensor.nbytes * (self._copies - 1) // self._copies
        self._exposed.exchanged(began, input_tensor.nbytes - output_tensor.nbytes + between_copies)
        return work


class ShardPresence:
    """Records which parameters of a sharded model were used by a step's samples.

    A group is summed over ranks as a whole, so ranks must agree on its gradients. If a group has run, parameters that
    this rank's samples did not use get zeros. A group runs on all ranks or on none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._present: set[int] = set()  # identities of parameters
        self._has_run: set[int] = set()  # identities of groups
        for module in model.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            if group is not None:
                self._watch(module, group)

    def take(self) -> list[bool]:
        """One value per trained parameter, for the time since the last call."""
        present = [id(parameter) in self._present for parameter in self._parameters]
        self._present.clear()
        self._has_run.clear()
        return present

    def _watch(self, module: nn.Module, group: Any) -> None:
        module.register_forward_hook(lambda *_: self._has_run.add(id(group)))
        sum_gradients = group.post_backward

        def fill_and_sum(*unused: Any) -> None:
            if group.reduce_grads and id(group) in self._has_run:
                self._fill(group)
            sum_gradients(*unused)

        group.post_backward = fill_and_sum

    def _fill(self, group: Any) -> None:
        """Record which parameters have a gradient, and give zeros to the others."""
        trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
        # With microbatches and mixed precision, gradients of earlier microbatches have the dtype of the reduction.
        kept = next((one.unsharded_accumulated_grad.dtype for one in trained if _has_kept(one)), None)
        for one in trained:
            weight = one._unsharded_param
            if _has_kept(one) or weight.grad is not None:
                self._present.add(id(one.sharded_param))
            if kept is None and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            elif kept is not None and not _has_kept(one):
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                one.unsharded_accumulated_grad, weight.grad = gradient.to(kept), None


def _has_kept(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None
