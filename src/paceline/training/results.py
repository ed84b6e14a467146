"""The results of a run, collected from all ranks: results.json and the summary on the screen."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import Any

from paceline.checkpoints.capture import gather_whole, model_tensors, optimizer_tensors
from paceline.checkpoints.ledger import hash_tensors
from paceline.metrics.console import format_seconds
from paceline.metrics.screen import BRIEF, output_mode
from paceline.metrics.start_clock import describe_start
from paceline.metrics.throughput import read_memory
from paceline.parallel.collectives import gather_texts
from paceline.runs.folder import RunFolder
from paceline.runtime.detect import World
from paceline.settings.tasks import MAXIMISED, METRICS, SINGLE_LABEL, best_metric
from paceline.training.components import Components
from paceline.training.earlier_figures import earlier_figures
from paceline.training.epoch import epoch_row
from paceline.training.evaluate import Evaluation
from paceline.training.limits import find_limits
from paceline.training.plan import RunPlan
from paceline.training.session import TrainingSession

_LAST_ROW = (  # fields of results.json in the last row of --json
    *("status", "test_accuracy", "test_loss", "best_epoch", "best_validation_accuracy", "steps", "training_seconds"),
    *("samples_per_second", "world_size", "strategy", "weights_sha256"),
)
RESULTS_SCHEMA = 1  # increased when a field of results.json changes its meaning or is removed


@dataclass(frozen=True)
class RunTotals:
    """Totals of this attempt on this rank."""

    seconds: float  # from the first step to the last checkpoint, evaluation included
    stepping_s: float  # to the last step
    samples: int
    wait_s: float
    timing: dict[str, Any]  # time of the steps by phase: metrics/phases.py
    energy_j: float | None  # of this rank's GPU; None if its driver does not report it


def hash_state(components: Components, device: str) -> dict[str, str]:
    """Hashes of the final weights and, for an exact run, of the optimizer's state too. Collective under FSDP."""
    module = components.model.module
    hashes = {"weights_sha256": hash_tensors(gather_whole(model_tensors(module), device))}
    if components.plan.config.parallel.exact:
        state = optimizer_tensors(module, components.optimizer)
        hashes["optimizer_sha256"] = hash_tensors(gather_whole(state, device))
    return hashes


def gather_ranks(world: World, totals: RunTotals) -> list[dict[str, Any]]:
    """One entry per rank, on every rank. Collective."""
    memory = read_memory(world.device)
    mine = {
        "rank": world.rank,
        "host": world.host,
        "device": world.device,
        "threads": world.threads,
        "samples": totals.samples,
        **_times_of(totals),
        "peak_memory_mb": memory.peak_mb,
        "energy_joules": totals.energy_j,
        **totals.timing,
    }
    return [json.loads(text) for text in gather_texts(json.dumps(mine), world)]


def _times_of(totals: RunTotals) -> dict[str, float | None]:
    """None for an attempt without steps: it has measured nothing, and 0 would be a wrong speed."""
    times = {
        "seconds": totals.seconds,
        "seconds_to_last_step": totals.stepping_s,
        "samples_per_second": totals.samples / max(totals.seconds, 1e-9),
        "data_wait_seconds": totals.wait_s,
    }
    return {name: value if totals.samples else None for name, value in times.items()}


@dataclass(frozen=True)
class Results:
    """The results of a finished run. `to_json` is the content of results.json."""

    plan: RunPlan
    world: World
    strategy: str
    precision: str
    gradient_exchange: str
    num_parameters: int
    steps: int
    best_epoch: int
    best_validation_accuracy: float | None  # None without a validation, and for a regression
    best_value: float | None  # of the metric that selects the best checkpoint; None without a validation
    test: Evaluation
    final_epoch: dict[str, Any]  # training figures of the last epoch
    ranks: list[dict[str, Any]]  # one entry per rank
    hashes: dict[str, str]
    limits: dict[str, Any]
    is_compiled: bool
    is_recorded: bool  # steps were replayed as CUDA graphs
    profile: dict[str, Any] | None  # None without --profile
    set_up_s: float  # what was computed from the training data before the first step
    start_up: dict[str, float]  # seconds before the first step, by stage: metrics/start_clock.py
    audits: int  # steps that were audited without a finding
    earlier: dict[str, Any]  # fields of to_json that an earlier attempt has measured: earlier_figures.py

    @property
    def training_seconds(self) -> float | None:
        """None if no step ran in this attempt."""
        return max(float(entry["seconds"]) for entry in self.ranks) if self.samples else None

    def clocks(self) -> dict[str, float | None]:
        """Two clocks. Published CIFAR-10 records also count set-up from the data and the test."""
        steps_s = max(float(entry["seconds_to_last_step"]) for entry in self.ranks) if self.samples else None
        return {
            "first_to_last_step_seconds": steps_s,
            "set_up_seconds": self.set_up_s,
            "test_seconds": self.test.seconds,
            "set_up_steps_and_test_seconds": None if steps_s is None else self.set_up_s + steps_s + self.test.seconds,
        }

    @property
    def samples(self) -> int:
        return int(sum(entry["samples"] for entry in self.ranks))

    @property
    def samples_per_second(self) -> float | None:
        return None if self.training_seconds is None else self.samples / max(self.training_seconds, 1e-9)

    def for_status(self) -> dict[str, Any]:
        """What status.json and `paceline runs` show: the accuracy, and the metric of a task without one."""
        config, accuracy = self.plan.config, self.test.accuracy
        shown = {} if accuracy is None else {"test_accuracy": accuracy}
        name = best_metric(config)[0]
        value = self.test.loss if name == "loss" else self.test.metrics.get(name)
        if config.data.task == SINGLE_LABEL or value is None or not math.isfinite(value):
            return shown
        return {**shown, "test_metric": name, "test_value": value}

    def to_json(self) -> dict[str, Any]:
        plan, train = self.plan, self.plan.config.train
        return {
            "schema_version": RESULTS_SCHEMA,
            "status": "finished",
            "task": plan.info.task,
            "test_accuracy": self.test.accuracy,
            "test_loss": self.test.loss,
            "test_metrics": self.test.metrics,
            "best_epoch": self.best_epoch,
            "best_validation_accuracy": self.best_validation_accuracy,
            "best_by": best_metric(plan.config)[0],
            "best_value": self.best_value,
            "steps": self.steps,
            "samples_seen": self.steps * train.global_batch_size,
            "samples_per_second": self.samples_per_second,
            "training_seconds": self.training_seconds,
            "clocks": self.clocks(),
            "start_up": self.start_up,
            "world_size": self.world.world_size,
            "strategy": self.strategy,
            **self.hashes,
            "distributed_training": {
                "world_size": self.world.world_size,
                "backend": self.world.backend,
                "gradients": self.gradient_exchange,
                "global_batch_size": train.global_batch_size,
                "rank_batch_size": plan.rank_batch_size,
                "epochs": train.epochs,
                "learning_rate": plan.peak_lr,
                "precision": self.precision,
                "is_compiled": self.is_compiled,
                "is_recorded": self.is_recorded,
            },
            "performance": {
                "avg_final_loss": self.final_epoch.get("loss"),
                "avg_final_accuracy": self.final_epoch.get("accuracy"),
                "total_samples_processed": self.samples or self.steps * train.global_batch_size,
                "samples_per_second": self.earlier.get("samples_per_second", self.samples_per_second),
                "time_per_epoch": self.final_epoch.get("seconds"),
            },
            "process_metrics": self.ranks,
            "limits": self.limits,
            **({"audits": self.audits} if plan.config.guard.audit else {}),
            **({"profile": self.profile or None} if self.profile is not None else {}),
            "model_info": {
                "name": plan.config.model.model_name,
                "parameters": self.num_parameters,
                "input_shape": list(plan.input_shape),
                "classes": list(plan.info.classes),
            },
            "test": self.test.by_class(plan.info.classes),
            "success": True,
            **self.earlier,
        }


def make_results(
    session: TrainingSession, test: Evaluation, ranks: list[dict[str, Any]], hashes: dict[str, str]
) -> Results:
    """Collective: the devices' own limits may be measured here."""
    components, state, profiler = session.components, session.state, session.guards.profiler
    profile = None
    if profiler is not None:
        profile = profiler.result.to_json() if profiler.result else {}  # empty: the run was too short to record
    return Results(
        plan=components.plan,
        world=session.world,
        strategy=components.model.strategy,
        precision=str(components.model.autocast_dtype or "torch.float32").removeprefix("torch."),
        gradient_exchange=components.step.exchange,
        num_parameters=components.num_parameters,
        steps=state.step,
        best_epoch=state.best_epoch,
        best_validation_accuracy=state.best_accuracy if state.best_epoch else None,
        best_value=_best_value(session) if state.best_epoch else None,
        test=test,
        final_epoch=epoch_row(session),
        ranks=ranks,
        hashes=hashes,
        limits=find_limits(components, session.world, ranks),
        is_compiled=components.model.is_compiled,
        is_recorded=components.step.is_recorded,
        profile=profile,
        set_up_s=session.guards.start.set_up_s,
        start_up=session.guards.start.summary(),
        audits=state.audits,
        earlier=earlier_figures(session, ranks, hashes),
    )


def _best_value(session: TrainingSession) -> float:
    merit = session.state.best_merit
    return merit if best_metric(session.config)[1] == MAXIMISED else -merit


# --- The summary


def describe_summary(results: Results, folder: RunFolder) -> list[str]:
    lines = [_accuracy_line(results), _speed_line(results), *_limit_lines(results, folder)]
    if folder.is_temporary:
        return lines
    path = shlex.quote(str(folder.path))
    page = "report.html, " if folder.report.exists() else ""
    weights = "best" if results.best_epoch else "latest"
    commands = {
        **({f"paceline predict {path} PICTURE": "label pictures"} if results.plan.info.takes_pictures else {}),
        f"paceline export {path} --format safetensors": "for other programs",
        "paceline runs": "all your runs",
    }
    widest = max(map(len, commands))
    lines.append(f"everything is in {folder.path}: {page}results.json, metrics.csv, checkpoints/{weights}")
    if output_mode() == BRIEF:
        return lines
    return ["", *lines, "", *(f"  {command:<{widest}}  {text}" for command, text in commands.items())]


def _speed_line(results: Results) -> str:
    seconds, speed = results.training_seconds, results.samples_per_second
    if seconds is None or speed is None:
        return f"all {results.steps} steps were trained before this start; only the test was repeated"
    ranks = f"{results.world.world_size} rank{'s' if results.world.world_size > 1 else ''}"
    return (
        f"{results.steps} steps in {format_seconds(seconds)} on {ranks},"
        f" {speed:,.0f} samples/s with validation and saving"
    )


def _limit_lines(results: Results, folder: RunFolder) -> list[str]:
    """What limited the speed of the run, and where its traces are."""
    lines = []
    verdict = results.limits["verdict"]
    if verdict is not None:
        lines.append(f"limit     {verdict['text']}; next: {verdict['try']}")
    profile = results.profile
    if profile is not None:
        lines.append(f"start     {describe_start(results.start_up)}")
    if profile == {}:
        lines.append("profile   nothing recorded: it begins after ten steps")
    elif profile is not None and not folder.is_temporary:
        last = profile["first_step"] + profile["steps"] - 1
        lines.append(
            f"profile   {folder.path / profile['folder']}: top.txt, and steps {profile['first_step']} to {last} of"
            " every rank to drop on https://ui.perfetto.dev"
        )
    return lines


def _accuracy_line(results: Results) -> str:
    """The metric of the task, the loss, then the metrics that the user chose."""
    test, config = results.test, results.plan.config
    chosen = [best_metric(config)[0], *(name.rpartition(":")[2] for name in config.train.metrics)]
    if config.data.task != SINGLE_LABEL:
        chosen.insert(0, next(iter(METRICS[config.data.task])))
    metrics = [f"{name} {test.metrics[name]:.4f}" for name in dict.fromkeys(chosen) if name in test.metrics]
    first = metrics.pop(0) if config.data.task != SINGLE_LABEL else f"accuracy {test.accuracy:.2%}"
    others = [] if test.accuracy is None or config.data.task == SINGLE_LABEL else [f"accuracy {test.accuracy:.2%}"]
    best = f"best epoch {results.best_epoch}" if results.best_epoch else "weights of the last step"
    return f"test {', '.join([first, f'loss {test.loss:.4f}', *metrics, *others])} ({best})"


def print_result(results: Results, folder: RunFolder) -> None:
    """The only line of --quiet, or the last row of --json."""
    if output_mode() == "quiet":
        where = "" if folder.is_temporary else f"{folder.path}: "
        print(f"{where}{_accuracy_line(results)}", flush=True)
    elif output_mode() == "json":
        values = results.to_json()
        row = {"kind": "result", "folder": str(folder.path), **{name: values[name] for name in _LAST_ROW}}
        print(json.dumps(row), flush=True)
