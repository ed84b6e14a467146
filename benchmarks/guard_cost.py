"""The cost of the guards: two gloo ranks take the same steps with and without them, alternating.

Guarded is the product: heartbeats and deadlines at every phase, a copy of the running statistics for a skipped step,
the gradient norm, the flags that are reduced with the gradients, the check of the numbers before the update, and the
phase clock. Bare is the same step without these. Called by reliability.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

ROUNDS, STEPS = 200, 5
LIMIT = 0.02
TARGET_S = 0.010


def build(num_classes: int, input_shape: tuple[int, ...]) -> Any:
    """A small convolutional network with BatchNorm."""
    from torch import nn

    layers: list[Any] = []
    for channels, width in ((input_shape[0], 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def measure() -> tuple[list[str], bool]:
    import torch.multiprocessing as mp

    lines = [
        "| model | samples per rank | clock | step without guards | with all of them | cost | 95 % interval |",
        "|---|---|---|---|---|---|---|",
    ]
    costs = {}
    for name, model in (("conv net, 57 k parameters", f"{__file__}:build"), ("cnn, 554 k parameters", "cnn")):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["OMP_NUM_THREADS"] = "1"
            mp.start_processes(  # type: ignore[no-untyped-call]
                _rank, args=(folder, model), nprocs=2, start_method="spawn"
            )
            answer = json.loads((Path(folder) / "answer").read_text())
        for clock in ("wall", "cpu"):
            bare_ms, guarded_ms, share, low, high = answer[clock]
            lines.append(
                f"| {name} | {answer['batch']} | {clock} | {bare_ms:.2f} ms | {guarded_ms:.2f} ms | {share:.2%} "
                f"| {low:.2%} to {high:.2%} |"
            )
        costs[name] = answer["cpu"][2]
    lines += [
        "",
        f"Two ranks; {ROUNDS} rounds of {STEPS} steps of each kind, alternating; medians. Other load on the machine "
        "affects the wall clock, but not the CPU time of the training thread. The part that grows with the parameters "
        "is the pass over the gradients that finds a bad one.",
    ]
    return lines, next(iter(costs.values())) < LIMIT


def _rank(rank: int, folder: str, model: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    batch = 16
    sessions = _build(rank, folder, model, batch)
    bare = statistics.median(_time(sessions["bare"], STEPS)[1] for _ in range(8))
    batch = max(2, round(batch * TARGET_S / bare / 2) * 2)
    sizes = torch.tensor([batch])
    dist.broadcast(sizes, 0)
    sessions = _build(rank, folder, model, int(sizes))
    for name in sessions:
        _time(sessions[name], STEPS)
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "guarded": []}
    for round_number in range(ROUNDS):
        # Alternate the order, so that neither kind is always second.
        for name in ("bare", "guarded") if round_number % 2 else ("guarded", "bare"):
            times[name].append(_time(sessions[name], STEPS))
    if rank == 0:
        answer = {clock: _compare(times, number) for number, clock in enumerate(("wall", "cpu"))}
        (Path(folder) / "answer").write_text(json.dumps({**answer, "batch": int(sizes)}))
    dist.barrier()
    dist.destroy_process_group()


def _compare(times: dict[str, list[tuple[float, float]]], clock: int) -> list[float]:
    """Medians in ms, and the median of the cost per round with its interval."""
    bare, guarded = ([pair[clock] for pair in times[name]] for name in ("bare", "guarded"))
    shares = sorted(g / b - 1 for b, g in zip(bare, guarded, strict=True))
    middle, spread = len(shares) / 2, 1.96 * math.sqrt(len(shares)) / 2  # ranks of a median's interval
    interval = [shares[math.floor(middle - spread)], shares[math.ceil(middle + spread) - 1]]
    return [1000 * statistics.median(bare), 1000 * statistics.median(guarded), statistics.median(shares), *interval]


def _build(rank: int, folder: str, model: str, batch: int) -> dict[str, Any]:
    """Two training sessions of the same recipe."""
    from paceline.runs.folder import RunFolder
    from paceline.runs.place import RunPlace
    from paceline.runtime.detect import World
    from paceline.runtime.pulse import Pulse
    from paceline.runtime.watchdog import Watchdog
    from paceline.settings.load import load_config
    from paceline.training.guards import Guards
    from paceline.training.session import open_session

    flags = ["--num-samples=2000", f"--global-batch-size={2 * batch}", "--track", "--skip-nonfinite=5"]
    flags.append(f"--model-name={model}")
    config = load_config("shapes-cnn", flags).config
    world = World(rank, 2, rank, 2, "the benchmark", "here", "cpu", "gloo", 1)
    sessions = {}
    for name in ("guarded", "bare"):
        path = RunFolder(Path(folder) / f"{name}-{batch}")
        path.create()
        guards = Guards(Watchdog(Pulse(Path(folder) / f"{name}-{rank}.pulse"), is_supervised=True))
        guards.watchdog.open_stacks(path.stacks_of(1, rank))
        sessions[name] = open_session(config, world, RunPlace(path.path, None), guards, eval_batches=None)
    sessions["bare"] = _strip(sessions["bare"], world)
    return sessions


def _strip(session: Any, world: Any) -> Any:
    """The same session with a step without guards."""
    import torch

    from paceline.parallel.apply import ParallelModel
    from paceline.parallel.shared_gradients import SharedGradients, share_gradients
    from paceline.training.step import StepReport, TrainStep

    class BareGuards:
        faults = None
        watchdog = session.guards.watchdog

        def enter(self, phase: str, step: int) -> None:
            pass

    class BareStep(TrainStep):
        def gradients(self, batch: Any, step: int, *, wants_stop: bool) -> StepReport:
            sums, _ = self._run_share(self.share_of(batch, step), step, wants_stop)
            return StepReport(sums, 0.0, 0.0, False, 0.0)

        def _record_waiting(self) -> None:
            pass

    class BareGradients(SharedGradients):
        """The same average, without norm and piggybacked scalars."""

        @torch.no_grad()
        def average(self, passengers: Any) -> Any:
            torch._foreach_copy_(self._mine, [parameter.grad for parameter in self._parameters])
            self._sum.add_up(scale=self._share)
            for parameter, gradient in zip(self._parameters, self._mean, strict=True):
                parameter.grad = gradient
            return passengers

    components = session.components
    module = components.model.module
    for parameter in module.parameters():
        parameter.grad = None
    shared = share_gradients(module, world)
    assert shared is not None, "the ranks share no memory here"
    shared.__class__ = BareGradients
    model = ParallelModel(module, module, "ddp", None, shared=shared)
    guards: Any = BareGuards()
    step = BareStep(model, components.optimizer, None, session.config, world, guards)
    return dataclasses.replace(
        session, components=dataclasses.replace(components, model=model, step=step), guards=guards
    )


def _time(session: Any, steps: int) -> tuple[float, float]:
    """Wall-clock and thread CPU seconds per step. Batches are prepared before the clock starts."""
    from itertools import islice

    from paceline.training.epoch import _take_step

    made = session.components.train_data.train_epoch(
        seed=1, epoch=0, global_batch_size=session.config.train.global_batch_size, first_step=0
    )
    batches = list(islice(made, min(steps, session.components.plan.steps_per_epoch)))
    is_bare = session.guards.faults is None and not hasattr(session.guards, "stop")
    began, cpu_began = time.perf_counter(), time.thread_time()
    for number in range(steps):
        batch = batches[number % len(batches)]
        if is_bare:
            report = session.components.step.gradients(batch, 0, wants_stop=False)
            session.components.step.update(0, 1e-6, report)
        else:
            session.guards.enter("data", 1)
            _take_step(session, batch, 1e-6)
    return (time.perf_counter() - began) / steps, (time.thread_time() - cpu_began) / steps
