"""The five steps of a Runnable pipeline: prepare_data, train, aggregate, evaluate, report.

Each is a plain function that Runnable calls with parameters. They share the run folder `runs/<run id>`. The training
is an ordinary `paceline train` in this folder. Files for Runnable's catalog are in its folder `artifacts`, with fixed
names. A retry has the same run id, so it finds the folder and resumes from the newest checkpoint.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoints.format import step_folders, step_of
from paceline.checkpoints.store import inspect_checkpoint, pointed_at
from paceline.errors import EXIT_FINISHED, PacelineError
from paceline.integrations.runnable.child import print_line, run_paceline
from paceline.integrations.runnable.parameters import (
    TrainArguments,
    fit_world,
    load_request,
    make_request,
    name_parameters,
)
from paceline.metrics.recorder import Row, read_rows, seconds_of_steps
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.folder import RUNS, RunFolder, write_atomically, write_json

RUN_ID = "RUNNABLE_RUN_ID"
RETRY_RUN_ID = "RUNNABLE_RETRY_RUN_ID"
_CHECKPOINT_END = "_checkpoint"
CHECKPOINT = f"distributed_model{_CHECKPOINT_END}"  # the last one
BEST_CHECKPOINT = f"best_model{_CHECKPOINT_END}"
CHECKPOINTS = f"*{_CHECKPOINT_END}/*"  # for the catalog
TRAINING_LOG = "training_output.log"  # output of all attempts
RESULTS = "distributed_training_results.json"

first_failure: PacelineError | None = None  # Runnable keeps the message of a failed step, but not its exit code
_Step = TypeVar("_Step", bound=Callable[..., Any])


class CommandFailed(PacelineError):
    """A command of a step failed. It has printed the reason itself."""

    def __init__(self, command: str, exit_code: int) -> None:
        super().__init__(f"{command} ended with exit code {exit_code}")
        self.exit_code = exit_code


def run_folder() -> RunFolder:
    return RunFolder(RUNS / os.environ.get(RUN_ID, "no-run-id"))


def artifacts() -> Path:
    """A folder below the working folder, from which Runnable's catalog copies files."""
    return run_folder().path / "artifacts"


def catalogued(*names: str) -> list[str]:
    """Patterns for `Catalog(put=...)`."""
    return [str(artifacts() / name) for name in names]


def _step(function: _Step) -> _Step:
    """Runnable turns every exception into a failed step. Keep the first one: it decides the exit code."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        global first_failure
        artifacts().mkdir(parents=True, exist_ok=True)
        try:
            return function(**given)
        except PacelineError as error:
            first_failure = first_failure or error
            print_line(error.screen())
            raise

    return wrapped  # type: ignore[return-value]


@_step
def prepare_data(**parameters: Any) -> dict[str, Any]:
    """Check the parameters, load the data and describe it in a file. Returns the request for `train`."""
    request, loaded = make_request(name_parameters(parameters))
    from paceline.data.registry import load_dataset
    from paceline.training.plan import split_samples

    config = loaded.config
    data = load_dataset(config.data, config.train.seed)
    train_ids, validation_ids = split_samples(data.info, config)
    info = {
        "name": data.info.name,
        "train_samples": len(train_ids),
        "validation_samples": len(validation_ids),
        "test_samples": len(data.test),
        "sample_shape": list(data.info.sample_shape),
        "classes": list(data.info.classes),
        "seed": config.train.seed,
        "fingerprint": data.fingerprint(),  # of all labels and some samples
    }
    write_json(artifacts() / "dataset_info.json", info)
    parts = f"{len(train_ids):,} training, {len(validation_ids):,} validation and {len(data.test):,} test samples"
    print_line(f"data      {info['name']}, {parts}, fingerprint {info['fingerprint']}")
    return {"recipe": request.recipe, "flags": request.flags}


@_step
def train(training_request: dict[str, Any]) -> None:
    """Run `paceline train` in the run folder. A retry resumes from the newest checkpoint."""
    request = TrainArguments(**training_request)
    loaded = load_request(request)
    flags, warning = fit_world(loaded)
    if warning:
        print_line(warning)
    arguments = ["train", request.recipe, *request.flags, *flags, f"--output-dir={run_folder().path}"]
    if os.environ.get(RETRY_RUN_ID):
        arguments += ["--resume=auto"]
    try:
        code = run_paceline(arguments, artifacts() / TRAINING_LOG)
    finally:
        _copy_logs(run_folder())  # most useful after a failure
    if code != EXIT_FINISHED:
        raise CommandFailed("paceline train", code)
    _copy_checkpoints(run_folder(), loaded.config.run.keep_every_epochs)


def _copy_logs(folder: RunFolder) -> None:
    """Copy the complete output of each rank. Console output of rank 0 is in training_output.log."""
    for log in folder.logs.glob("rank-*.log"):
        target = artifacts() / f"process_{log.stem.removeprefix('rank-')}_output.log"
        shutil.copyfile(log, target)
        if log.stem == "rank-0":
            with target.open("ab") as out, (artifacts() / TRAINING_LOG).open("rb") as console:
                shutil.copyfileobj(console, out)


def _copy_checkpoints(folder: RunFolder, keep_every_epochs: int) -> None:
    """Copy the last one, the best one, and those that `keep_every_epochs` keeps, each with its manifest."""
    for old in artifacts().glob(f"*{_CHECKPOINT_END}"):
        shutil.rmtree(old)
    latest, best = (pointed_at(folder.checkpoints, name) for name in ("latest", "best"))
    assert latest is not None  # a finished run has a checkpoint
    shutil.copytree(latest, artifacts() / CHECKPOINT)
    if best is not None:
        shutil.copytree(best, artifacts() / BEST_CHECKPOINT)
    for path in step_folders(folder.checkpoints) if keep_every_epochs else []:
        state = inspect_checkpoint(path).state
        clock = EpochClock.from_json(state)
        epoch, inside = clock.locate(step_of(path)) if clock else (0, 1)
        if inside == 0 and epoch % keep_every_epochs == 0:
            shutil.copytree(path, artifacts() / f"epoch_{epoch}{_CHECKPOINT_END}")


@_step
def aggregate(training_request: dict[str, Any]) -> tuple[float | None, float]:
    """Combine the metrics of all ranks. Returns avg_final_accuracy and total_training_time."""
    folder = run_folder()
    results = json.loads(folder.results.read_text())
    rows = read_rows(folder.metrics_jsonl)
    epochs = [row for row in rows if row.get("phase") == "train"]
    in_epochs_s = sum(row["seconds"] for row in epochs)
    seconds = seconds_of_steps(rows, results["distributed_training"]["global_batch_size"])
    # If the last attempt had nothing left to train, take the last epoch from the rows.
    final = {name: results["performance"][f"avg_final_{name}"] for name in ("loss", "accuracy")}
    if final["accuracy"] is None and epochs:
        final = {name: epochs[-1][name] for name in final}
    # One rate: samples per second of step time. results.json also counts validation and saving of the last attempt.
    results["samples_per_second"] = results["samples_seen"] / max(seconds, 1e-9)
    results["performance"] |= {
        "avg_final_loss": final["loss"],
        "avg_final_accuracy": final["accuracy"],
        "total_samples_processed": results["samples_seen"],
        "total_training_time": seconds,
        "samples_per_second": results["samples_per_second"],
        "time_per_epoch": in_epochs_s / len(epochs) if epochs else None,
        "learning_rate": results["distributed_training"]["learning_rate"],
    }
    results["dataset"] = json.loads((artifacts() / "dataset_info.json").read_text())
    results["process_metrics"] = [add_epochs(entry, epochs, seconds) for entry in results["process_metrics"]]
    write_json(artifacts() / RESULTS, results)
    for entry in results["process_metrics"]:
        write_json(artifacts() / f"metrics_rank_{entry['rank']}.json", entry)
    for file in (folder.metrics_jsonl, folder.metrics_csv):
        shutil.copyfile(file, artifacts() / file.name)
    ranks = len(results["process_metrics"])
    print_line(f"metrics   of {ranks} rank{'s' if ranks > 1 else ''}: {results['steps']} steps in {seconds:.1f} s")
    return final["accuracy"], seconds


def add_epochs(entry: dict[str, Any], epochs: list[Row], seconds: float) -> dict[str, Any]:
    """Add the metrics of one rank's samples per epoch, over all attempts. Its rate is its share of the total rate."""
    rank, own = entry["rank"], []
    for row in epochs:
        columns = row.get("ranks", {})
        if all(rank < len(columns.get(name, ())) for name in ("loss", "accuracy", "samples")):
            values = {name: columns[name][rank] for name in ("loss", "accuracy", "samples")}
            own.append({"epoch": row["epoch"], **values, "seconds": row["seconds"]})
    samples = round(sum(row["samples"] for row in own)) or entry["samples"]
    rate = {"samples": samples, "seconds": seconds, "samples_per_second": samples / max(seconds, 1e-9)}
    return {**entry, **rate, "epochs": own}


@_step
def evaluate(training_request: dict[str, Any]) -> float:
    """Test the best weights of the catalog's checkpoint in one process. Returns test_accuracy."""
    from paceline.training.reuse import evaluate_run, open_run

    name = (
        BEST_CHECKPOINT if (artifacts() / BEST_CHECKPOINT).is_dir() else CHECKPOINT
    )  # there is no best checkpoint without validation
    run = open_run(artifacts() / name, [], trust_code=True)  # the pipeline's own run, possibly from another node
    evaluation = evaluate_run(run)
    classes = run.classes
    content = evaluation.to_json(classes, step=run.checkpoint.step, checkpoint=name)
    write_json(artifacts() / "evaluation.json", content)
    accuracy = math.nan if evaluation.accuracy is None else evaluation.accuracy  # a regression has none
    print_line(f"test      accuracy {accuracy:.2%} with {name}, step {run.checkpoint.step}")
    return accuracy


@_step
def report(
    training_request: dict[str, Any],
    avg_final_accuracy: float | None,
    total_training_time: float,
    test_accuracy: float,
) -> None:
    """Copy the run's page, config and environment to the catalog, and print a summary."""
    folder = run_folder()
    page = folder.path / "report.html"
    for file in (page, folder.config, folder.environment):
        if file.is_file():
            shutil.copyfile(file, artifacts() / file.name)
    results = json.loads((artifacts() / RESULTS).read_text())
    speed = results["performance"]["samples_per_second"]
    trained = "-" if avg_final_accuracy is None else f"{avg_final_accuracy:.2%}"
    tested = json.loads((artifacts() / "evaluation.json").read_text())
    lines = [
        f"recipe    {training_request['recipe']} on {results['world_size']} ranks, {results['steps']} steps",
        f"accuracy  {trained} in the last epoch of training, {test_accuracy:.2%} on the test set"
        f" ({tested['checkpoint']}, step {tested['step']})",
        f"time      {total_training_time:.1f} s in steps, {speed:,.0f} samples/s",
        f"weights   sha256 {results['weights_sha256']}",
        f"folder    {folder.path}",
    ]
    write_atomically(artifacts() / "report.txt", "\n".join(lines) + "\n")
    print("\n".join(lines))
