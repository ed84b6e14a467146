"""Shows a plan: the resolved config with the origin of each value, batches, steps, learning rate and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.launch.request import check_joined_world, decide_processes, explain_fewer_ranks
from paceline.runs.place import decide_place
from paceline.runtime.detect import read_rank_environment
from paceline.settings.load import LoadedConfig
from paceline.settings.rules import check_world
from paceline.settings.schema import Config, field_table

if TYPE_CHECKING:  # the command must be fast
    from paceline.training.memory import MemoryEstimate


def show_plan(loaded: LoadedConfig) -> None:
    """Print what `paceline train` would do, on rank 0. Nothing is started."""
    environment = read_rank_environment()
    if environment is not None:
        check_joined_world(loaded, environment)
    world_size = environment.world_size if environment else decide_processes(loaded)
    check_world(loaded, world_size)
    if environment is None or environment.rank == 0:
        _print_config(loaded)
        _print_numbers(loaded, world_size)


def _print_config(loaded: LoadedConfig) -> None:
    print(f"recipe {loaded.recipe_name} ({loaded.recipe_path})")
    group = ""
    for name, spec in field_table().items():
        if spec.group != group:
            group = spec.group
            print(f"\n{group}")
        value = spec.value_in(loaded.config)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        origin = loaded.origin(name)
        print(f"  {name:<24} {shown:<22} {origin if origin == 'default' else loaded.where(name)}")


def _print_numbers(loaded: LoadedConfig, world_size: int) -> None:
    from paceline.data.registry import describe_dataset, require_used_split
    from paceline.parallel.apply import resolve_precision, resolve_strategy
    from paceline.runtime.detect import count_gpus
    from paceline.training.header import describe_batch, describe_data, describe_kept, describe_steps
    from paceline.training.memory import estimate_memory
    from paceline.training.plan import make_plan

    config = loaded.config
    info = describe_dataset(config.data, config.train.seed)
    require_used_split(loaded, info.num_validation > 0)
    plan = make_plan(config, info, world_size)
    strategy = resolve_strategy(config, world_size)
    device = "cuda:0" if count_gpus(config.parallel) else "cpu"
    precision = resolve_precision(config, device)
    memory = estimate_memory(plan, strategy, is_mixed=precision is not None, is_cuda=device != "cpu")
    first, middle, last = (plan.learning_rate(step) for step in (0, plan.total_steps // 2, plan.total_steps - 1))
    lanes = f"{plan.lanes} lane{'s' if plan.lanes > 1 else ''}"
    rows = {
        "ranks": f"{world_size} on {device.partition(':')[0]}, strategy {strategy}, {lanes}",
        "data": describe_data(plan),
        **({"order": info.order} if info.order else {}),
        **({"keep": describe_kept(plan)} if config.data.keep_share < 1 else {}),
        "batch": describe_batch(plan),
        "steps": describe_steps(plan),
        "rate": f"{_describe_peak(config, plan.peak_lr)}; "
        f"{config.optim.schedule}: {first:.4g} at first, {middle:.4g} halfway, {last:.4g} at last",
        "precision": str(precision or "float32").removeprefix("torch."),
        "parameters": f"{memory.num_parameters:,}",
        "memory": _describe_memory(memory),
        "folder": str(decide_place(loaded).folder),
    }
    note = explain_fewer_ranks(loaded)
    if note is not None and world_size == decide_processes(loaded):  # else a launcher decides
        rows["note"] = note
    print("\nplan")
    for label, text in rows.items():
        print(f"  {label:<18} {text}")
    print("\nnothing was started; `paceline train` with the same arguments starts it")


def _describe_memory(memory: MemoryEstimate) -> str:
    parts = {
        "weights": memory.weights,
        "averages": memory.averages,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "exchange": memory.exchange,
    }
    listed = ", ".join(f"{name} {_mb(size)}" for name, size in parts.items() if size)
    return f"about {_mb(memory.total)} per rank: {listed}"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:,.0f} KB"


def _describe_peak(config: Config, peak: float) -> str:
    if config.optim.optimizer == "muon":  # the size of its updates does not depend on the batch
        return f"{peak:g}"
    from paceline.training.schedule import REFERENCE_BATCH

    return f"{config.optim.base_lr:g} x {config.train.global_batch_size} / {REFERENCE_BATCH} = {peak:g}"
