"""The results of a run, collected from all ranks: results.json and the summary on the screen."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from paceline.checkpoints.capture import gather_whole, model_tensors, optimizer_tensors
from paceline.metrics.console import format_seconds
from paceline.metrics.screen import BRIEF, output_mode
from paceline.metrics.throughput import read_memory
from paceline.parallel.collectives import gather_texts
from paceline.runs.folder import RunFolder
from paceline.runtime.detect import World
from paceline.settings.tasks import MAXIMISED, best_metric
from paceline.training.components import Components
from paceline.training.epoch import epoch_row
from paceline.training.evaluate import Evaluation
from paceline.training.limits import find_limits
from paceline.training.plan import RunPlan
from paceline.training.session import TrainingSession
from paceline.training.weights_hash import hash_tensors

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
        "seconds": totals.seconds,
        "seconds_to_last_step": totals.stepping_s,
        "samples_per_second": totals.samples / max(totals.seconds, 1e-9),
        "data_wait_seconds": totals.wait_s,
        "peak_memory_mb": memory.peak_mb,
        "energy_joules": totals.energy_j,
        **totals.timing,
    }
    return [json.loads(text) for text in gather_texts(json.dumps(mine), world)]


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
    profile: dict[str, Any] | None  # None without --profile

    @property
    def training_seconds(self) -> float:
        return float(max(entry["seconds"] for entry in self.ranks))

    @property
    def samples(self) -> int:
        return int(sum(entry["samples"] for entry in self.ranks))

    @property
    def samples_per_second(self) -> float:
        return self.samples / max(self.training_seconds, 1e-9)

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
            },
            "performance": {
                "avg_final_loss": self.final_epoch.get("loss"),
                "avg_final_accuracy": self.final_epoch.get("accuracy"),
                "total_samples_processed": self.samples,
                "samples_per_second": self.samples_per_second,
                "time_per_epoch": self.final_epoch.get("seconds"),
            },
            "process_metrics": self.ranks,
            "limits": self.limits,
            **({"profile": self.profile or None} if self.profile is not None else {}),
            "model_info": {
                "name": plan.config.model.model_name,
                "parameters": self.num_parameters,
                "input_shape": list(plan.input_shape),
                "classes": list(plan.info.classes),
            },
            "test": self.test.by_class(plan.info.classes),
            "success": True,
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
        profile=profile,
    )


def _best_value(session: TrainingSession) -> float:
    merit = session.state.best_merit
    return merit if best_metric(session.config)[1] == MAXIMISED else -merit


# --- The summary


def describe_summary(results: Results, folder: RunFolder) -> list[str]:
    lines = [
        _accuracy_line(results),
        f"{results.steps} steps in {format_seconds(results.training_seconds)}"
        f" on {results.world.world_size} rank{'s' if results.world.world_size > 1 else ''},"
        f" {results.samples_per_second:,.0f} samples/s with validation and saving",
        *_limit_lines(results, folder),
    ]
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


def _limit_lines(results: Results, folder: RunFolder) -> list[str]:
    """What limited the speed of the run, and where its traces are."""
    lines = []
    verdict = results.limits["verdict"]
    if verdict is not None:
        lines.append(f"limit     {verdict['text']}; next: {verdict['try']}")
    profile = results.profile
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
    test, config = results.test, results.plan.config
    chosen, _ = best_metric(config)
    shown = [chosen, *(name.rpartition(":")[2] for name in config.train.metrics)]
    rest = "".join(f", {name} {test.metrics[name]:.4f}" for name in dict.fromkeys(shown) if name in test.metrics)
    best = f"best epoch {results.best_epoch}" if results.best_epoch else "weights of the last step"
    accuracy = "" if test.accuracy is None else f"accuracy {test.accuracy:.2%}, "
    return f"test {accuracy}loss {test.loss:.4f}{rest} ({best})"


def print_result(results: Results, folder: RunFolder) -> None:
    """The only line of --quiet, or the last row of --json."""
    if output_mode() == "quiet":
        where = "" if folder.is_temporary else f"{folder.path}: "
        print(f"{where}{_accuracy_line(results)}", flush=True)
    elif output_mode() == "json":
        values = results.to_json()
        row = {"kind": "result", "folder": str(folder.path), **{name: values[name] for name in _LAST_ROW}}
        print(json.dumps(row), flush=True)
