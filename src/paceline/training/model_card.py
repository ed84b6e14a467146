"""The card of an exported model: its origin, training, metrics, use and limits, in Markdown."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import torch

import paceline
from paceline.data.dataset import DatasetInfo
from paceline.errors import printable_line
from paceline.runs.folder import RunFolder
from paceline.runs.json_files import ENVIRONMENT, RESULTS, read_object
from paceline.settings.tasks import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from paceline.training.header import describe_data
from paceline.training.reuse import OpenRun

NOT_RECORDED = "not recorded"

_ANSWERS = {
    SINGLE_LABEL: """\
The model gives every input one of the {classes} classes of `labels.txt`, whatever it shows: it has no answer for
"none of these". """,
    MULTI_LABEL: """\
The model decides for each of the {classes} labels of `labels.txt` by itself whether an input has it. """,
    REGRESSION: """\
The model gives every input the numbers that `labels.txt` names, whatever it shows. """,
}
_LIMITS = """\
Inputs must be prepared as `preprocessing.json` says. The figures above hold for the test set of
{dataset} and say nothing about data of another origin. Scores are not calibrated probabilities. How the model
treats unusual or manipulated inputs, or groups of people, was not measured; do so before decisions rest on it.
The terms of the data and of the starting weights apply."""


def describe_weights(run: OpenRun) -> str:
    epoch = run.checkpoint.state.get("best_epoch")
    which = f"best epoch {epoch}" if epoch else "the latest, before the end of an epoch"
    average = ", moving average" if run.config.optim.ema_decay else ""
    return f"step {run.checkpoint.step} ({which}{average})"


def write_card(folder: RunFolder, run: OpenRun, snippet: str, exported: list[tuple[str, str]]) -> str:
    """The text of card.md. `snippet`: Python that uses the exported model. `exported`: rows about the file."""
    plan, model = run.plan, run.config.model
    name, results = folder.path.resolve().name, _results_of(folder, run)
    environment = read_object(folder.environment, ENVIRONMENT)
    recipe = re.fullmatch(r"(.+?)-\d{8}-\d{6}(-\d+)?", name)  # older runs do not record it
    recorded = printable_line(environment.get("recipe", ""))
    shape = "x".join(map(str, plan.input_shape))
    identity = [
        ("task", plan.info.task),
        ("recipe", recorded or (recipe[1] if recipe else f"{NOT_RECORDED}; the run's config.yaml is one")),
        ("model", f"{model.model_name}, {run.num_parameters:,} parameters, input {shape}"),
        *exported,
    ]
    versions = {key: environment[key] for key in ("paceline", "python") if key in environment}
    versions |= environment.get("packages", {})
    now = f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z}"
    git = environment.get("git") or {}
    changes = "dirty: with uncommitted changes" if git.get("dirty") else "clean"
    status = folder.read_status()
    origin = [
        ("git commit", f"`{git['commit']}`, {changes}" if git.get("commit") else NOT_RECORDED),
        ("trained with", ", ".join(f"{key} {value}" for key, value in versions.items()) or NOT_RECORDED),
        ("run", f"{status.get('status')}, {status.get('updated')}" if status else NOT_RECORDED),
        ("exported", f"{now}, paceline {paceline.__version__}, torch {torch.__version__}"),
    ]
    sections = {
        "Data": f"{describe_data(plan)}.",
        "Training": _table(("", ""), *_training_rows(run, results)),
        "Metrics": _describe_metrics(results, plan.info),
        "How to use it": f"In this folder:\n\n```python\n{snippet}```",
        "Intended use and limits": _ANSWERS[plan.info.task].format(classes=plan.info.num_classes)
        + _LIMITS.format(dataset=plan.info.name),
        "Where it comes from": _table(("", ""), *origin),
    }
    chapters = "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())
    return f"# {name}\n\n{_table(('', ''), *identity)}\n{chapters}"


def _training_rows(run: OpenRun, results: dict[str, Any]) -> list[tuple[str, str]]:
    optim, train = run.config.optim, run.config.train
    weights = run.config.run.init_from or run.config.model.weights
    about = run.checkpoint.manifest.about
    momentum = f", momentum {optim.momentum:g}" if optim.optimizer in ("sgd", "nesterov") else ""
    return [
        ("epochs", f"{train.epochs}"),
        ("steps", str(results["steps"]) if results else f"{run.checkpoint.step} up to these weights"),
        ("global batch size", f"{train.global_batch_size}"),
        ("optimizer", f"{optim.optimizer}{momentum}, weight decay {optim.weight_decay:g}"),
        ("learning rate", f"{run.plan.peak_lr:g} at its peak, {optim.schedule}"),
        ("precision", results["distributed_training"]["precision"] if results else NOT_RECORDED),
        ("world size", f"{about.get('world_size', NOT_RECORDED)}"),
        ("strategy", f"{about.get('strategy', NOT_RECORDED)}"),
        ("seed", f"{train.seed}"),
        ("started from", "random weights" if weights == "none" else f"weights: {weights}"),
    ]


def _describe_metrics(results: dict[str, Any], info: DatasetInfo) -> str:
    if not results:
        return "The run folder holds no results for these weights: the run did not finish, or was continued."
    test, task = results["test"], info.task
    accuracy = results["test_accuracy"]
    figures = [
        *([] if accuracy is None else [("test accuracy", f"{accuracy:.2%} of {test['samples']:,} samples")]),
        ("test loss", f"{results['test_loss']:.4f}"),
        *((f"test {name}", f"{value:.4g}") for name, value in results["test_metrics"].items() if value is not None),
        ("best epoch", f"{results['best_epoch'] or 'none was finished'}"),
    ]
    if task == SINGLE_LABEL:
        head: tuple[str, ...] = ("class", "test samples", "accuracy")
        table = [
            (name, f"{sum(row):,}", f"{row[index] / sum(row):.2%}" if sum(row) else "no samples")
            for index, (name, row) in enumerate(zip(info.classes, test["confusion_matrix"], strict=True))
        ]
        return _table(("", ""), *figures) + "\n\n" + _table(head, *table)
    is_numbers = task == REGRESSION
    name = "mae" if is_numbers else "average_precision"
    head = ("number", "mean absolute error") if is_numbers else ("class", "average precision")
    values = test.get(f"class_{name}", {})
    rows = [(key, "no samples" if value is None else f"{value:.4g}") for key, value in values.items()]
    return _table(("", ""), *figures) + "\n\n" + _table(head, *rows)


def _results_of(folder: RunFolder, run: OpenRun) -> dict[str, Any]:
    """results.json if it is complete and of these weights; a run that is continued may have an older one."""
    results, state = read_object(folder.results, RESULTS), run.checkpoint.state
    test, classes = results.get("test", {}), run.plan.info.num_classes
    task = run.plan.info.task
    figures = [results.get(key) for key in ("test_loss", "steps", *(["test_accuracy"] if task != REGRESSION else []))]
    figures += [test.get("samples"), results.get("distributed_training", {}).get("precision")]
    matrix = test.get("confusion_matrix", [])
    is_square = len(matrix) == classes and all(len(row) == classes for row in matrix)
    if None in figures or (task == SINGLE_LABEL and not is_square):
        return {}
    keys = ("best_epoch",) if state.get("best_epoch") else ("best_epoch", "steps")
    own = {"best_epoch": state.get("best_epoch"), "steps": run.checkpoint.step}
    return results if all(results.get(key) == own[key] for key in keys) else {}


def _table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(printable_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
