"""Checkpoints of earlier runs of a flow, found by Metaflow's client.

A checkpoint matches if it has the same recipe and the same identity: the settings that must not change when a run
continues. Metaflow itself only knows the newest checkpoint of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from metaflow import Checkpoint, Flow, Run
from metaflow.exception import MetaflowNotFound

from paceline.checkpoints.identity import BEFORE
from paceline.integrations.metaflow.datastore import CHECKPOINT_NAME
from paceline.integrations.metaflow.request import Request, StartPoint

_MOST_RUNS = 100
_MOST_ORIGINS = 20  # of a run that was resumed many times


def newest_of_flow(request: Request, flow: str, own_run: str, step: str) -> tuple[StartPoint | None, str]:
    """The newest matching checkpoint, of the newest run that has one, in this namespace; a note if none matches."""
    try:
        runs = [run for run in islice(Flow(flow), _MOST_RUNS) if run.id != own_run]
    except MetaflowNotFound:
        runs = []  # the first run
    return _newest_match(request, runs, step)


def newest_of_origin(request: Request, flow: str, origin_run: str, step: str) -> tuple[StartPoint | None, str]:
    """The same for the run that `flow.py resume` continues, and for the runs that it had resumed itself."""
    return _newest_match(request, _origins(f"{flow}/{origin_run}"), step)


def choose(request: Request, checkpoints: list[dict[str, Any]]) -> tuple[StartPoint | None, str]:
    """The newest matching checkpoint. If none matches: what differs in the newest one."""
    matching = [checkpoint for checkpoint in checkpoints if not _difference(request, checkpoint["metadata"])]
    if request.best_is_latest:
        matching = [checkpoint for checkpoint in matching if checkpoint["metadata"].get("is_best")] or matching
    newest = max(matching, key=_created_on, default=None)
    if newest is not None:
        return as_start_point(newest), ""
    other = max(checkpoints, key=_created_on, default=None)
    if other is None:
        return None, ""
    return None, f"{_run_of(other)} is another run: {_difference(request, other['metadata'])}"


def as_start_point(checkpoint: Mapping[str, Any]) -> StartPoint:
    metadata = checkpoint["metadata"]
    return StartPoint(
        checkpoint["key"], metadata["best_key"], metadata["step"], checkpoint["pathspec"], int(checkpoint["attempt"])
    )


def _newest_match(request: Request, runs: Iterable[Run], step: str) -> tuple[StartPoint | None, str]:
    note = ""
    for run in runs:
        found, why_not = choose(request, list(_checkpoints_of(run, step)))
        if found is not None:
            return found, ""
        note = note or why_not
    return None, note


def _checkpoints_of(run: Run, step: str) -> Iterator[dict[str, Any]]:
    """Uploads of the tasks of a step, in all their attempts."""
    try:
        tasks = list(run[step])
    except KeyError:  # it ended before this step
        return
    for task in tasks:
        for attempt in range(task.current_attempt + 1):
            yield from Checkpoint().list(name=CHECKPOINT_NAME, task=task, attempt=attempt)


def _origins(pathspec: str) -> Iterator[Run]:
    for _ in range(_MOST_ORIGINS):
        run = Run(pathspec, _namespace_check=False)
        yield run
        if run.origin_pathspec is None or run.origin_pathspec.endswith("/None"):  # so Metaflow names no origin
            return
        pathspec = run.origin_pathspec


def _difference(request: Request, metadata: Mapping[str, Any]) -> str:
    """Why this checkpoint belongs to another run; empty if it matches."""
    if metadata.get("recipe") != request.about["recipe"]:
        return f"recipe {metadata.get('recipe')!r}, now {request.about['recipe']!r}"
    if "identity" not in metadata:
        return "its settings are not recorded"
    # Through JSON: tuples are lists in the store.
    saved, now = (json.loads(json.dumps(values)) for values in (metadata["identity"], request.about["identity"]))
    saved = {**BEFORE, **saved}
    return ", ".join(
        f"{name} {saved.get(name)!r}, now {value!r}" for name, value in now.items() if saved.get(name) != value
    )


def _created_on(checkpoint: Mapping[str, Any]) -> str:
    return str(checkpoint["created_on"])


def _run_of(checkpoint: Mapping[str, Any]) -> str:
    return "/".join(str(checkpoint["pathspec"]).split("/")[:2])
