"""The highest FLOP/s of a device: a large matrix product in the run's precision, measured once and cached.

Peak values in data sheets assume other clocks and cooling. This value is measured on the device itself, with the
run's number of ranks. It is cached in a small file per kind of device.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from paceline.metrics.timing import gather_numbers, repeat
from paceline.models.registry import build_model
from paceline.parallel.collectives import wait_for_all
from paceline.runs.folder import write_json
from paceline.runtime.detect import World
from paceline.runtime.resources import usable_cores
from paceline.settings.schema import ModelConfig
from paceline.settings.small_files import read_json_object
from paceline.settings.values import cache_folder

_FIRST_SIDE, _LAST_SIDE = 256, 16384
_LONG_ENOUGH_S = {"cpu": 0.02, "cuda": 0.004}  # a shorter product does not reach full speed
_SECONDS = {"cpu": 0.6, "cuda": 0.2}
_SAMPLES = 2  # BatchNorm cannot train on one
_MOST_WORDS = 120


def measure_matmul_flops(device: str, dtype: torch.dtype) -> float:
    """The best measured FLOP/s of a large product of square matrices."""
    kind = torch.device(device).type
    side, best_s, is_last = _FIRST_SIDE, 0.0, False
    generator = torch.Generator(device).manual_seed(0)  # keep the run's random state
    with _tf32_on_gpus(kind):
        while not is_last:
            # Doubling the side multiplies the work by eight.
            is_last = 8 * best_s >= _LONG_ENOUGH_S[kind] or 2 * side > _LAST_SIDE
            # Use random numbers: a GPU multiplies ones faster, because that needs less power.
            left, right, out = (
                torch.randn(side, side, device=device, dtype=dtype, generator=generator) for _ in range(3)
            )
            product = partial(torch.matmul, left, right, out=out)
            best_s = min(repeat(product, device, _SECONDS[kind] if is_last else 0.0).seconds)
            rate = 2 * side**3 / best_s
            side *= 2
    return rate


@contextmanager
def _tf32_on_gpus(kind: str) -> Iterator[None]:
    """Float32 convolutions may use TF32 on a GPU, so the ceiling must use TF32, too."""
    if kind != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def name_precision(dtype: torch.dtype, device: str) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{name} (tf32)" if dtype is torch.float32 and device.startswith("cuda") else name


# --- Cached between runs


@dataclass(frozen=True)
class Conditions:
    """Everything a ceiling depends on."""

    device: str
    precision: str
    cores: int
    threads: int  # per rank
    ranks_per_node: int
    torch: str


def conditions_of(world: World, dtype: torch.dtype) -> Conditions:
    is_cuda = world.device.startswith("cuda")
    return Conditions(
        device=torch.cuda.get_device_name(world.device) if is_cuda else name_processor(),
        precision=name_precision(dtype, world.device),
        cores=0 if is_cuda else usable_cores(),
        threads=0 if is_cuda else world.threads,
        ranks_per_node=world.local_world_size,
        torch=torch.__version__,
    )


def name_processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cache_file(conditions: Conditions) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(conditions), sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / "ceilings" / f"{digest}.json"


def recall(conditions: Conditions) -> float | None:
    """The value that an earlier run measured under these conditions; None if the file is missing or invalid."""
    try:
        content = read_json_object(cache_file(conditions))
        rate = float(content["flops_per_s"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # RuntimeError: the user has no home folder
        return None
    is_ours = all(content.get(name) == value for name, value in asdict(conditions).items())
    return rate if is_ours and math.isfinite(rate) and rate > 0 else None


def remember(conditions: Conditions, flops_per_s: float) -> None:
    """Write errors are ignored: the next run measures again."""
    with suppress(OSError, RuntimeError):
        path = cache_file(conditions)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**asdict(conditions), "flops_per_s": flops_per_s})


# --- For a run


def find_ceilings(world: World, dtype: torch.dtype, *, may_measure: bool, surpassed: float = 0.0) -> list[float] | None:
    """The ceiling of every rank; None if it is unknown and may not be measured. Collective.

    `surpassed`: the FLOP/s that this rank has reached. A lower cached ceiling was measured on a busy machine.
    """
    conditions = conditions_of(world, dtype)
    known = recall(conditions) or 0.0
    rates = [row[0] for row in gather_numbers([known if known > surpassed else 0.0], world)]
    if min(rates) == 0.0:
        if not may_measure:
            return None
        rates = _mean_per_node([row[0] for row in gather_numbers([_measure(world, dtype)], world)], world)
        if world.local_rank == 0 and rates[world.rank] > 0.0:
            remember(conditions, rates[world.rank])
    return rates if min(rates) > 0.0 else None


def _mean_per_node(rates: list[float], world: World) -> list[float]:
    """Average over the ranks of a node. They share its resources, so their individual values vary."""
    size = world.local_world_size
    nodes = [rates[first : first + size] for first in range(0, len(rates), size)]
    return [sum(node) / len(node) if min(node) > 0.0 else 0.0 for node in nodes for _ in node]


def _measure(world: World, dtype: torch.dtype) -> float:
    """Measure on all ranks at once, as in training: they may share cores, memory and power."""
    wait_for_all(world)
    try:
        return measure_matmul_flops(world.device, dtype)
    except torch.OutOfMemoryError:  # the run's tensors fill the device
        return 0.0


# Count the floating-point operations of a training step: matrix products and convolutions, forward and backward.
#
# A copy of the model is built on the meta device, where tensors have shapes and no data. Nothing is computed. The run's
# weights, statistics and random numbers do not change.


NOTHING_TO_COUNT = "this model has no matrix product or convolution to count"


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of forward and backward; None and the reason if they cannot be counted."""

    per_sample: int | None
    note: str = ""


def count_flops(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> FlopCount:
    """The cost grows linearly with the number of samples, so a few samples give the cost of each."""
    try:
        total = _count_on("meta", config, input_shape, num_classes)
    except Exception:  # a user's model may read tensor values, which the meta device does not have
        try:
            with torch.random.fork_rng(devices=[]):
                total = _count_on("cpu", config, input_shape, num_classes)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            return FlopCount(None, f"this model's arithmetic cannot be counted ({reason[:_MOST_WORDS]})")
    if not total:
        return FlopCount(None, NOTHING_TO_COUNT)
    return FlopCount(total // _SAMPLES)


def _count_on(device: str, config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> int:
    # Imported here: the import takes half a second.
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device(device):
        model = build_model(config, input_shape, num_classes, load_weights=False).train()
        inputs = torch.zeros(_SAMPLES, *input_shape)
        answers = torch.zeros(_SAMPLES, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(inputs), answers).backward()
    return int(counter.get_total_flops())
