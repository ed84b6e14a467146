"""Checkpoints of earlier runs of a flow, found by Metaflow's client.

A checkpoint fits if it was sent by the same recipe with the same identity: the settings that may not change when a
run goes on. Metaflow itself only knows the newest checkpoint of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from metaflow import Checkpoint, Flow, Run
from metaflow.exception import MetaflowNotFound

from paceline.integrations.metaflow.courier import PARCEL_NAME
from paceline.integrations.metaflow.request import Request, StartPoint

_MOST_RUNS = 100
_MOST_ORIGINS = 20  # of a run that was resumed again and again


def newest_of_flow(request: Request, flow: str, own_run: str, step: str) -> tuple[StartPoint | None, str]:
    """The newest checkpoint that fits, of the newest run that has one, in this namespace; and a note if none fits."""
    try:
        runs = [run for run in islice(Flow(flow), _MOST_RUNS) if run.id != own_run]
    except MetaflowNotFound:
        runs = []  # the first run
    return _newest_that_fits(request, runs, step)


def newest_of_origin(request: Request, flow: str, origin_run: str, step: str) -> tuple[StartPoint | None, str]:
    """The same for the run that `flow.py resume` goes on with, and the ones that this run had resumed itself."""
    return _newest_that_fits(request, _origins(f"{flow}/{origin_run}"), step)


def choose(request: Request, parcels: list[dict[str, Any]]) -> tuple[StartPoint | None, str]:
    """The newest parcel that fits; a note on what does not fit of the newest other one."""
    fitting = [parcel for parcel in parcels if not _difference(request, parcel["metadata"])]
    if request.best_is_latest:
        fitting = [parcel for parcel in fitting if parcel["metadata"].get("is_best")] or fitting
    newest = max(fitting, key=_created_on, default=None)
    if newest is not None:
        return as_start_point(newest), ""
    other = max(parcels, key=_created_on, default=None)
    if other is None:
        return None, ""
    return None, f"{_run_of(other)} is another run: {_difference(request, other['metadata'])}"


def as_start_point(parcel: Mapping[str, Any]) -> StartPoint:
    said = parcel["metadata"]
    return StartPoint(parcel["key"], said["best_key"], said["step"], parcel["pathspec"], int(parcel["attempt"]))


def _newest_that_fits(request: Request, runs: Iterable[Run], step: str) -> tuple[StartPoint | None, str]:
    note = ""
    for run in runs:
        found, why_not = choose(request, list(_parcels_of(run, step)))
        if found is not None:
            return found, ""
        note = note or why_not
    return None, note


def _parcels_of(run: Run, step: str) -> Iterator[dict[str, Any]]:
    """What the tasks of a step have sent, in all their attempts."""
    try:
        tasks = list(run[step])
    except KeyError:  # it ended before this step
        return
    for task in tasks:
        for attempt in range(task.current_attempt + 1):
            yield from Checkpoint().list(name=PARCEL_NAME, task=task, attempt=attempt)


def _origins(pathspec: str) -> Iterator[Run]:
    for _ in range(_MOST_ORIGINS):
        run = Run(pathspec, _namespace_check=False)
        yield run
        if run.origin_pathspec is None:
            return
        pathspec = run.origin_pathspec


def _difference(request: Request, said: Mapping[str, Any]) -> str:
    """Why this checkpoint is another run's, in words; empty if it fits."""
    if said.get("recipe") != request.about["recipe"]:
        return f"recipe {said.get('recipe')!r}, now {request.about['recipe']!r}"
    if "identity" not in said:
        return "it does not say which settings it was trained with"
    return ", ".join(
        f"{name} {said['identity'].get(name)!r}, now {value!r}"
        for name, value in request.about["identity"].items()
        if said["identity"].get(name) != value
    )


def _created_on(parcel: Mapping[str, Any]) -> str:
    return str(parcel["created_on"])


def _run_of(parcel: Mapping[str, Any]) -> str:
    return "/".join(str(parcel["pathspec"]).split("/")[:2])
