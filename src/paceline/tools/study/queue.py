"""Runs the cells of a study as Slurm arrays, one per world size, and waits for them without a time limit.

`jobs.json` records which cell is in which job. The wait can be interrupted: the same command later finds the jobs
again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.integrations.slurm.client import SlurmUnavailable, read_state, submit_script
from paceline.integrations.slurm.prepare import check_cluster, with_site
from paceline.integrations.slurm.script import write_array_script
from paceline.launch.job import JobSpec
from paceline.launch.job_record import write_private
from paceline.launch.submission import require_inputs
from paceline.runs.folder import write_atomically
from paceline.runs.json_files import Fields, ListOf, fit
from paceline.settings.load import LoadedConfig
from paceline.settings.small_files import read_json_value
from paceline.settings.values import Setting
from paceline.tools.study.cells import CellState, open_cells, prepare
from paceline.tools.study.collect import measure, note_path, state_of
from paceline.tools.study.grid import CellSpec

JOBS_FILE = "jobs.json"
_JOBS = ListOf(Fields(required={"job_id": str, "cluster": str, "cells": ListOf(str)}))
_POLL_S = (2.0, 30.0)  # shortest and longest interval: jobs may queue for hours
_PATIENCE_S = 600.0  # how long the Slurm controller may be unreachable


@dataclass(frozen=True)
class ArrayJob:
    job_id: str
    cluster: str
    cells: tuple[str, ...]  # task 0 first


def job_settings(on: str, given: Sequence[Setting], *, decided: Sequence[str]) -> dict[str, Setting]:
    """The flags of the jobs over the site profile; none for cells on this machine. `decided` flags are refused."""
    for setting in given:
        if on != "slurm":
            raise UserError(f"{setting.field.flag} needs --on slurm", where=setting.where, hint="--on slurm")
        if setting.field.name in decided:
            raise UserError("this is decided for each cell", where=setting.where, hint="leave it out")
    if on != "slurm":
        return {}
    return {name: setting for name, setting in with_site(given).items() if name not in decided}


def check_jobs(
    given: Mapping[str, Setting],
    loaded: LoadedConfig,
    shapes: dict[int, JobSpec],
    cells: Sequence[CellState],
    size_flag: str = "",
) -> None:
    """Before the first job is submitted: missing inputs, and jobs that this cluster can never start.

    size_flag: the flag that decides the number of nodes, if it is not a flag of jobs.
    """
    sizes = Counter(found.cell.world_size for found in cells)
    jobs = [replace(shapes[size], array=f"0-{count - 1}", resume="") for size, count in sorted(sizes.items())]
    if jobs:
        require_inputs(loaded, brings_own_weights=bool(jobs[0].container_image or jobs[0].environment))
        check_cluster(jobs, given, places={"nodes": size_flag} if size_flag else {})


def read_jobs(folder: Path) -> list[ArrayJob]:
    try:
        rows = fit(read_json_value(folder / JOBS_FILE), _JOBS)
    except (OSError, ValueError):
        return []
    return [ArrayJob(row["job_id"], row["cluster"], tuple(row["cells"])) for row in rows]


def write_scripts(
    folder: Path, spec: CellSpec, shapes: dict[int, JobSpec], cells: Sequence[CellState]
) -> list[tuple[Path, list[CellState], str, str]]:
    """For each world size: the script's path, its cells, its text, and the text of its file of commands."""
    scripts = []
    for size in sorted({found.cell.world_size for found in cells}):
        mine = [found for found in cells if found.cell.world_size == size]
        path = folder / "jobs" / f"{size}-ranks.sbatch"
        # A cell is measured in one piece: a failed job is reported and retried, not requeued.
        shape = replace(shapes[size], folder=folder / "jobs", max_requeues=0, resume="", signal_notice_s=0)
        commands = [spec.command(found.cell, folder) for found in mine]
        script, lines = write_array_script(shape, commands, path.with_suffix(".commands"))
        scripts.append((path, mine, script, lines))
    return scripts


def run_queue(
    folder: Path,
    spec: CellSpec,
    shapes: dict[int, JobSpec],
    states: Sequence[CellState],
    *,
    retries: bool,
    on_change: Callable[[CellState], Any],
    say: Callable[[str], Any],
) -> None:
    """Submit the open cells that are not in a job yet, then wait until every job has ended."""
    jobs = [job for job in read_jobs(folder) if read_state(job.job_id, job.cluster).is_active]
    taken = {name for job in jobs for name in job.cells}
    todo = [found for found in open_cells(states, retries=retries) if found.cell.name not in taken]
    for found in todo:
        prepare(folder, spec, found)
    for path, mine, script, lines in write_scripts(folder, spec, shapes, todo):
        (path.parent / "logs").mkdir(parents=True, exist_ok=True)
        write_private(path.with_suffix(".commands"), lines)
        write_private(path, script)
        job_id, cluster = submit_script(path, shapes[mine[0].cell.world_size])
        jobs.append(ArrayJob(job_id, cluster, tuple(found.cell.name for found in mine)))
        _keep(folder, jobs)
        say(f"job {job_id}: an array of {len(mine)} cells, {mine[0].cell.world_size} ranks each")
    _wait(folder, jobs, {found.cell.name: found for found in states}, on_change)


def _keep(folder: Path, jobs: Sequence[ArrayJob]) -> None:
    write_atomically(folder / JOBS_FILE, json.dumps([asdict(job) for job in jobs], indent=2) + "\n")


def _wait(
    folder: Path, jobs: list[ArrayJob], states: dict[str, CellState], on_change: Callable[[CellState], Any]
) -> None:
    pause_s, away_since = _POLL_S[0], 0.0
    while jobs:
        still = []
        for job in jobs:
            try:
                is_active = read_state(job.job_id, job.cluster).is_active
                away_since = 0.0
            except SlurmUnavailable:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _PATIENCE_S:
                    raise
                is_active = True
            for name in job.cells:
                if _update(folder, states[name], job, is_active=is_active):
                    on_change(states[name])
            if is_active:
                still.append(job)
        jobs = still
        if jobs:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _POLL_S[1])


def _update(folder: Path, found: CellState, job: ArrayJob, *, is_active: bool) -> bool:
    """Whether a cell's row has changed."""
    if found.state in ("finished", "failed"):
        return False
    state, reason = state_of(folder, found.cell)
    if state in ("waiting", "running") and not is_active:
        state, reason = "failed", f"job {job.job_id}_{job.cells.index(found.cell.name)} ended before the run did"
        write_atomically(note_path(folder, found.cell), json.dumps({"code": 1, "words": reason}) + "\n")
    if state == found.state:
        return False
    found.state, found.reason = state, reason
    if state == "running":
        found.began = time.monotonic()
    if state == "finished":
        found.measured = measure(folder, found.cell)
        found.wall_s = time.monotonic() - found.began if found.began else None
    return True
