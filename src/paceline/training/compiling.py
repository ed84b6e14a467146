"""Decides whether to compile a model: only if it saves more time in the run than it takes.

Compiling takes tens of seconds the first time, and a few seconds with results in this machine's cache. It makes every
step shorter; how much is learned from earlier runs (metrics/compile_gain.py). Runs with promised bits (--exact,
--deterministic) are not compiled by `auto`: the decision would depend on the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from paceline.metrics.compile_gain import Gain, expected_gain, recall_times, remember_times
from paceline.parallel.apply import resolve_precision, resolve_strategy
from paceline.parallel.collectives import broadcast_text, is_true_on_any
from paceline.runtime.detect import World
from paceline.settings.schema import SHARDED, Config
from paceline.settings.values import cache_folder
from paceline.training.plan import RunPlan

_log = logging.getLogger("paceline")


def choose_to_compile(model: nn.Module, config: Config, plan: RunPlan, world: World) -> bool:
    """The same on every rank. Collective."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))  # torch's own is in /tmp
    if config.train.compile != "auto":
        return config.train.compile == "always" and _can_compile(world)
    if not world.device.startswith("cuda") or config.train.deterministic or config.parallel.exact:
        return False  # on CPUs it was slower: 2,300 against 5,320 images/s on the course's CNN
    if resolve_strategy(config, world.world_size) in SHARDED:
        return False  # not tried yet
    if config.train.activation_checkpointing:
        return False  # not tried on GPUs yet
    mark = _mark_of(config, plan, world)
    gain = expected_gain(recall_times(_times_of(mark)), is_cached=mark.exists())
    answer = gain.pays(plan.last_step, _plain_step_s(model, config, plan, world))
    if broadcast_text(str(answer), world) != "True" or not _can_compile(world):
        return False
    if world.is_primary:
        with suppress(OSError):  # the next run then assumes the longer time
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return True


def learn_from(config: Config, plan: RunPlan, world: World, *, step_s: float, is_compiled: bool) -> Gain | None:
    """Remember the time of this run's steps. Returns the gain that compiling would have had; None on CPUs."""
    if not world.device.startswith("cuda"):
        return None
    mark = _mark_of(config, plan, world)
    if world.is_primary:
        remember_times(_times_of(mark), **{"compiled_step_s" if is_compiled else "plain_step_s": step_s})
    return expected_gain(recall_times(_times_of(mark)), is_cached=mark.exists())


def compile_for_sizes(count: int) -> None:
    """Each input size is compiled separately. By default torch gives up after a few."""
    from torch._dynamo import config  # imported late: it takes a second

    config.recompile_limit = max(config.recompile_limit, 4 * count)


def _can_compile(world: World) -> bool:
    """Whether every rank finds a compiler; if not, a note is logged. Collective."""
    if not is_true_on_any(not has_compiler(world.device, os.environ), world):
        return True
    kind = "C" if world.device.startswith("cuda") else "C++"
    _log.info("note: steps are not compiled: no %s compiler was found (install gcc and g++)", kind)
    return False


def has_compiler(device: str, environment: Mapping[str, str]) -> bool:
    """Triton builds its launchers with CC, gcc or clang; on CPUs torch uses CXX or g++."""
    if device.startswith("cuda"):
        names = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    else:
        names = [environment.get("CXX") or "g++"]
    words = [shlex.split(name)[:1] for name in names]  # CC may have options
    return any(shutil.which(word, path=environment.get("PATH")) is not None for found in words for word in found)


def _mark_of(config: Config, plan: RunPlan, world: World) -> Path:
    """A file that exists if this model was compiled on this machine before."""
    work = [asdict(config.model), plan.training_shapes, plan.microbatch_size, config.train.amp_dtype, world.world_size]
    work += [torch.__version__, torch.cuda.get_device_name(world.device)]
    return cache_folder() / "compiled" / "seen" / hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]


def _times_of(mark: Path) -> Path:
    return mark.with_name(f"{mark.name}.json")


def _plain_step_s(model: nn.Module, config: Config, plan: RunPlan, world: World) -> float:
    """Seconds of a forward and backward pass without compilation. The model does not change."""
    model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = [buffer.clone() for buffer in model.buffers()]
    inputs = torch.zeros(plan.microbatch_size, *plan.largest_shape, device=world.device)
    dtype = resolve_precision(config, world.device)
    seconds = 0.0
    try:
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            with torch.autocast("cuda", dtype or torch.float32, enabled=dtype is not None):
                total = model(inputs).float().sum()
            total.backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
    except torch.OutOfMemoryError:
        return 0.0  # the first step then fails with the message
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
    return seconds * config.train.accumulate
