"""What the steps of a flow call. Everything that knows Metaflow is here and in `cards.py`.

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
from paceline.integrations.metaflow.gang import Place
from paceline.integrations.metaflow.node import Node, join
from paceline.integrations.metaflow.request import Request, StartPoint, check_request
from paceline.launch.policy import FINAL_CODES
from paceline.metrics.recorder import Row, read_rows
from paceline.runs.folder import RunFolder
from paceline.runtime.secret import RUN_SECRET, read_secret

CARD = "training"
TEST_CARD = "test"
_PINNED = ("torch", "numpy", "metaflow-checkpoint")
_PACKAGE_ENVIRONMENTS = ("pypi", "conda", "fast-bakery")
_IN_WORDS = {EXIT_PREEMPTED: "stopped and saved", EXIT_HANG: "a rank stood still"}


class Refused(MetaflowException):  # type: ignore[misc]
    """A person's mistake: one screen, no traceback."""

    headline = "This cannot be started"


class TrainingFailed(MetaflowException):  # type: ignore[misc]
    headline = "The training failed"


@dataclass(frozen=True)
class Trained:
    """What the node of rank 0 has in its hands when training is over."""

    results: dict[str, Any]  # results.json
    history: list[Row]  # metrics.jsonl
    model: str  # a folder that `evaluate_model` and `paceline evaluate` understand
    label: str
    about: dict[str, Any]


def packaged(flow: type) -> type:
    """A flow whose steps bring paceline along under `--environment=pypi`, in the versions that are installed here.

    Metaflow refuses @pypi in any other environment, so elsewhere the flow stays as it is.
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
    """Errors that explain themselves, in Metaflow's way of telling them.

    `is_final`: a person's mistake is not tried again, where the step has @retry. `folder`: a model that Metaflow has
    fetched and removes when the task ends, so its path says nothing.
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
    """The flow's parameters as one request; what is wrong with them is said here, before anything starts.

    `train_step` is the name of the step that trains: with load policy eager its checkpoints are looked for.
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
    """Train as this node of the gang. Yields the outcome on the node that has it, None on the others."""
    place = read_place(request)
    with one_screen(is_final=True):
        keys, origin = tell_start(request) if place.is_main else ([], "")
        is_resumed = bool(current.origin_run_id)
        node = join(request, place, current.checkpoint, current.retry_count, keys, origin, is_resumed=is_resumed)
    try:
        with _card(node):
            code = node.train()
        if code != 0:
            _fail(node, code)
        yield outcome(request, node.folder) if node.has_results else None
    finally:
        node.close()


def read_place(request: Request) -> Place:
    """A secret in the tasks' environment goes before the one in the datastore, which more people can read."""
    gang = current.parallel
    secret = read_secret({RUN_SECRET: request.secret, **os.environ})
    name = f"{current.flow_name}/{current.run_id}/{current.step_name}/{current.retry_count}"
    return Place(gang.num_nodes, gang.node_index, gang.main_ip, name, secret)


def choose_start(request: Request) -> tuple[StartPoint | None, str]:
    """Where to go on from, and a note if a checkpoint was found that is another run's. For the main node."""
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


def tell_start(request: Request) -> tuple[list[str], str]:
    """The keys of the parcels to go on from, and where they came from in words, which are printed."""
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
    """None: a flow may leave the card out."""
    try:
        return current.card[name]
    except (AttributeError, KeyError):
        return None


def _fail(node: Node, code: int) -> None:
    words = node.gang.lost or _IN_WORDS.get(code, "its own report is above")
    message = f"node {node.place.own}: paceline ended with exit code {code} ({words})"
    # Nodes with disks of their own may miss a checkpoint that arrives a moment late; the next attempt has it. The main
    # node knows that there was one: without it, ranks have refused the checkpoint that they were to go on from.
    is_late = code == EXIT_CHECKPOINT and node.place.nodes > 1 and not (node.place.is_main and not node.courier.history)
    if code in FINAL_CODES and not is_late:
        print(f"{message}; it would fail again in the same way", file=sys.stderr, flush=True)
        sys.exit(METAFLOW_EXIT_DISALLOW_RETRY)
    raise TrainingFailed(message)


def outcome(request: Request, folder: RunFolder) -> Trained:
    results = json.loads(folder.results.read_text())
    return Trained(
        results=results,
        history=read_rows(folder.metrics_jsonl),
        model=str(_pack_model(folder)),
        label=f"{request.about['dataset']}_{request.about['model_name']}".replace(":", "_").replace("/", "_"),
        about={**request.about, "test_accuracy": results["test_accuracy"], "steps": results["steps"]},
    )


def _pack_model(folder: RunFolder) -> Path:
    """A run folder with nothing but its best checkpoint: whole, sealed, and no code in it."""
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
            namespace(None)  # whoever trained it
            saved = Run(run).data.model
        except (MetaflowNotFound, MetaflowInvalidPathspec) as error:
            raise UserError("there is no such run", where="--run", got=run, hint=str(error)) from None
        except AttributeError:
            saved = None
        if saved is None:
            raise UserError("this run has saved no model", where="--run", got=run, hint="is it finished?")
        return saved


def evaluate_model(path: str, flags: str = "") -> dict[str, Any]:
    """Accuracy and loss of a saved model on its test set, in this process; also on the step's card, if it has one."""
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
