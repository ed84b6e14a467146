"""The functions that the steps of a flow call.

with training(self.request) as trained:
    if trained is not None:        # the node of rank 0
        self.results = trained.results
        self.model = current.model.save(trained.model, label=trained.label, metadata=trained.about)
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from metaflow import Run, current, namespace, pypi_base
from metaflow.exception import (
    METAFLOW_EXIT_DISALLOW_RETRY,
    MetaflowException,
    MetaflowInvalidPathspec,
    MetaflowNotFound,
)

import paceline
from paceline.checkpoints.format import step_folders
from paceline.checkpoints.store import pointed_at
from paceline.errors import EXIT_CHECKPOINT, EXIT_HANG, EXIT_PREEMPTED, PacelineError, UserError
from paceline.integrations.metaflow.cards import TrainingCard, fill_test_card
from paceline.integrations.metaflow.earlier import as_start_point, newest_of_flow, newest_of_origin
from paceline.integrations.metaflow.node import Node, join, member_of
from paceline.integrations.metaflow.request import Request, StartPoint, check_request
from paceline.launch.gang import GangMember
from paceline.launch.policy import FINAL_CODES
from paceline.metrics.recorder import Row, read_rows
from paceline.runs.folder import RunFolder
from paceline.runtime.secret import RUN_SECRET, read_secret

CARD = "training"
TEST_CARD = "test"
_PINNED = ("torch", "numpy", "metaflow-checkpoint")
_PACKAGE_ENVIRONMENTS = ("pypi", "conda", "fast-bakery")
_REASONS = {EXIT_PREEMPTED: "stopped and saved", EXIT_HANG: "a rank made no progress"}


class Refused(MetaflowException):  # type: ignore[misc]
    """A mistake of the user: one screen, no traceback."""

    headline = "This cannot be started"


class TrainingFailed(MetaflowException):  # type: ignore[misc]
    headline = "The training failed"


@dataclass(frozen=True)
class Trained:
    """The results of a training step, on the node of rank 0."""

    results: dict[str, Any]  # results.json
    history: list[Row]  # metrics.jsonl
    model: str  # a folder that `evaluate_model` and `paceline evaluate` understand
    label: str
    about: dict[str, Any]


def packaged(flow: type) -> type:
    """Under `--environment=pypi`: add paceline to the steps of a flow, in the version that is installed here.

    Metaflow refuses @pypi in any other environment, so elsewhere the flow does not change.
    """
    if not _wants_packages(sys.argv, os.environ):
        return flow
    packages = {"paceline": paceline.__version__}
    for name in _PINNED:
        with suppress(PackageNotFoundError):
            packages[name] = version(name).partition("+")[0]  # a local build such as +cpu is in no index
    python = ".".join(map(str, sys.version_info[:2]))
    decorated: type = pypi_base(python=python, packages=packages)(flow)
    return decorated


def _wants_packages(arguments: list[str], environment: Mapping[str, str]) -> bool:
    asked = [environment.get(name, "") for name in ("METAFLOW_ENVIRONMENT", "METAFLOW_DEFAULT_ENVIRONMENT")]
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--environment"):
            asked.append(word.partition("=")[2] or following)
    return any(name in _PACKAGE_ENVIRONMENTS for name in asked)


@contextmanager
def one_screen(*, is_final: bool = False, folder: str = "") -> Iterator[None]:
    """Show errors of Paceline on one screen, without a traceback.

    `is_final`: a mistake of the user is not retried by @retry. `folder`: a model that Metaflow has fetched and removes
    when the task ends. Its path is not shown.
    """
    try:
        yield
    except PacelineError as error:
        if is_final and isinstance(error, UserError):
            print(error.screen(), file=sys.stderr, flush=True)
            sys.exit(METAFLOW_EXIT_DISALLOW_RETRY)
        screen = error.screen()
        raise Refused(screen.replace(folder, "the model") if folder else screen) from None


def checked(*, train_step: str = "train", **parameters: Any) -> Request:
    """Check the parameters of a flow before anything starts, and make one request of them.

    `train_step` is the name of the step that trains. With load policy eager, its earlier checkpoints are searched.
    """
    with one_screen():
        request = check_request(**parameters)
    if request.load_policy == "eager":
        found, note = newest_of_flow(request, current.flow_name, current.run_id, train_step)
        request = replace(request, earlier=found)
        print(found or f"From the beginning: no earlier run has a checkpoint for this one{note and f' ({note})'}")
    nodes = f"{request.cluster_size} node" + ("s" if request.cluster_size > 1 else "")
    print(f"{request.name}: {request.about['model_name']} on {request.about['dataset']}, {nodes}")
    return request


@contextmanager
def training(request: Request) -> Iterator[Trained | None]:
    """Train on this node. Yields the results on the leader, None on the others."""
    member = read_member(request)
    with one_screen(is_final=True):
        keys, origin = print_start(request) if member.is_leader else ([], "")
        is_resumed = bool(current.origin_run_id)
        node = join(request, member, current.checkpoint, current.retry_count, keys, origin, is_resumed=is_resumed)
    try:
        with _card(node):
            code = node.train()
        if code != 0:
            _fail(node, code)
        yield collect_results(request, node.folder) if node.is_leader else None
    finally:
        node.close()


def read_member(request: Request) -> GangMember:
    """A secret in the tasks' environment has priority over the one in the datastore, which more people can read."""
    parallel = current.parallel
    return member_of(
        f"{current.flow_name}/{current.run_id}/{current.step_name}/{current.retry_count}",
        node=parallel.node_index,
        nodes=parallel.num_nodes,
        host=parallel.main_ip,
        timeout_s=request.node_timeout_s,
        secret=read_secret({RUN_SECRET: request.secret, **os.environ}),
    )


def choose_start(request: Request) -> tuple[StartPoint | None, str]:
    """The checkpoint to continue from, and a note if the one that was found belongs to another run. For the leader."""
    if request.load_policy == "none":
        return None, ""
    if current.checkpoint.is_loaded:  # by an earlier attempt of this task
        return as_start_point(current.checkpoint.info.to_dict()), ""
    note = ""
    if current.origin_run_id:  # flow.py resume
        found, note = newest_of_origin(request, current.flow_name, current.origin_run_id, current.step_name)
        if found is not None:
            return found, ""
    return request.earlier, note


def print_start(request: Request) -> tuple[list[str], str]:
    """Print and return where training continues from: the keys of the checkpoints, and their description."""
    found, note = choose_start(request)
    origin = str(found) if found else "From the beginning"
    print(f"{origin} (load policy {request.load_policy})", flush=True)
    if note and found is None:
        print(f"note: {note}", flush=True)
    return found.keys if found else [], origin


@contextmanager
def _card(node: Node) -> Iterator[None]:
    card = _own_card(CARD)
    if card is None:
        yield
        return
    live = TrainingCard(card, node)
    live.start()
    try:
        yield
    finally:
        live.finish()


def _own_card(name: str) -> Any:
    """None: the flow has no such card."""
    try:
        return current.card[name]
    except (AttributeError, KeyError):
        return None


def _fail(node: Node, code: int) -> None:
    reason = node.lost or _REASONS.get(code, "its own report is above")
    message = f"node {node.own}: paceline ended with exit code {code} ({reason})"
    # A node with its own disk may fetch a checkpoint too late; the next attempt has it. If the leader has uploaded
    # none, the ranks have refused the checkpoint that they should continue from.
    has_uploaded = bool(node.datastore.history) or not node.is_leader
    is_late = code == EXIT_CHECKPOINT and len(node.start.nodes) > 1 and has_uploaded
    if code in FINAL_CODES and not is_late:
        print(f"{message}; a retry would fail in the same way", file=sys.stderr, flush=True)
        sys.exit(METAFLOW_EXIT_DISALLOW_RETRY)
    raise TrainingFailed(message)


def collect_results(request: Request, folder: RunFolder) -> Trained:
    results = json.loads(folder.results.read_text())
    return Trained(
        results=results,
        history=read_rows(folder.metrics_jsonl),
        model=str(_pack_model(folder)),
        label=f"{request.about['dataset']}_{request.about['model_name']}".replace(":", "_").replace("/", "_"),
        about={**request.about, "test_accuracy": results["test_accuracy"], "steps": results["steps"]},
    )


def _pack_model(folder: RunFolder) -> Path:
    """A run folder with only its best checkpoint, and without code."""
    model = folder.path.parent / "model"
    best = pointed_at(folder.checkpoints, "best") or step_folders(folder.checkpoints)[0]
    shutil.copytree(best, model / "checkpoints" / best.name)
    for path in (folder.config, folder.environment, folder.results):
        shutil.copyfile(path, model / path.name)
    return model


def find_model(run: str, key: str) -> Any:
    """A model that a flow has saved: by its key, or of a run (PacelineFlow/1234)."""
    with one_screen():
        if bool(run) == bool(key):
            raise UserError("which model?", got=f"--run {run!r}, --model-key {key!r}", hint="give one of the two")
        if key:
            return key
        try:
            namespace(None)  # of any user
            saved = Run(run).data.model
        except (MetaflowNotFound, MetaflowInvalidPathspec) as error:
            raise UserError("there is no such run", where="--run", got=run, hint=str(error)) from None
        except AttributeError:
            saved = None
        if saved is None:
            raise UserError("this run has saved no model", where="--run", got=run, hint="is it finished?")
        return saved


def evaluate_model(path: str, flags: str = "") -> dict[str, Any]:
    """Accuracy and loss of a saved model on its test set. Also fills the card of the step, if it has one."""
    from paceline.training.reuse import evaluate_run, open_run

    with one_screen(folder=path):
        run = open_run(Path(path), shlex.split(flags))
        evaluation = evaluate_run(run)
    classes, checkpoint = run.classes, run.checkpoint
    test = evaluation.to_json(classes, step=checkpoint.step, checkpoint=checkpoint.path.name)
    card, config = _own_card(TEST_CARD), run.config
    if card is not None:
        fill_test_card(card, f"{config.model.model_name} on {config.data.dataset}", test)
    return test
