"""The plain files of a run folder, and every command that reads one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.mutations import Mutate, mutate_csv, mutate_json, mutate_json_lines
from fuzz.samples import copy_runs
from fuzz.sandbox import Format, Reader
from paceline.cli.command import run_verb
from paceline.library.run import load_run
from paceline.metrics.recorder import Recorder, inherit_rows
from paceline.reports.run_page import write_run_page
from paceline.runs import lock
from paceline.runs.catalog import find_run
from paceline.runs.folder import RunFolder
from paceline.runs.owner import this_process
from paceline.runs.stores import read_note
from paceline.runtime.slurm import returns_without_progress

ONE = "runs/one"


def build_finished(samples: Path, folder: Path) -> None:
    copy_runs(samples, folder)
    # Without a job: a query to a cluster takes long, and other cases have one.
    (folder / ONE / "job.json").unlink()


def build_running(samples: Path, folder: Path) -> None:
    """Its owner is a process of an earlier boot of this machine."""
    build_finished(samples, folder)
    run = RunFolder(folder / ONE)
    run.write_status("running", step=3, last_step=6, eta_s=2.5)
    run.lock.write_text(json.dumps({**vars(this_process()), "process_start": "1"}) + "\n")


def build_submitted(samples: Path, folder: Path) -> None:
    copy_runs(samples, folder)


def _open_as_library(folder: Path) -> None:
    run = load_run(ONE)
    for words in (run.status, run.results, repr(run), run._repr_html_(), run.metrics(), run.metrics("step")):
        str(words)
    for table in (run.metrics(), run.metrics("val"), run.metrics("step")):
        repr(table), table._repr_html_()


def _resume_recording(folder: Path) -> None:
    Recorder(RunFolder(folder / ONE), resume_step=4).close()


def _inherit(folder: Path) -> None:
    target = RunFolder(folder / "runs" / "three")
    target.create()
    inherit_rows(RunFolder(folder / ONE), target)


def _evaluate_pages_json(folder: Path) -> None:
    """The page embeds its figures as JSON for a browser: no NaN, no infinity."""
    page = write_run_page(folder / ONE).read_text(encoding="utf-8")
    for part in page.split('<script type="application/json"')[1:]:
        json.loads(part.partition(">")[2].partition("</script>")[0], parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} in a page's JSON")


def _own(folder: Path) -> None:
    with lock.owned(folder / ONE / "run.lock"):
        pass


def _print_status(folder: Path) -> None:
    run_verb("status", [ONE])
    run_verb("status", [ONE, "--json"])


def _print_runs(folder: Path) -> None:
    run_verb("runs", [])
    run_verb("runs", ["--json", "--sort", "progress"])


LIST = Reader("runs", _print_runs, every=3)
STATUS = Reader("status", _print_status, every=3)
PAGE = Reader("report page", _evaluate_pages_json, every=10)
COMPARE = Reader("compare", lambda folder: run_verb("compare", [ONE, "runs/two", "--html=compare.html"]), every=10)
COMPARE_JSON = Reader("compare --json", lambda folder: run_verb("compare", ["runs/two", ONE, "--json"]), every=10)
LIBRARY = Reader("load_run", _open_as_library, every=3)
CLEAN = Reader("clean", lambda folder: run_verb("clean", ["--older-than", "0m", "--dry-run"]), every=2)
CHECKPOINTS = Reader("checkpoints", lambda folder: run_verb("checkpoints", [ONE, "--verify"]))
FIND = Reader("a run by its job", lambda folder: find_run("123"))
RECORD = Reader("resume: metrics", _resume_recording, changes_folder=True)
INHERIT = Reader("resume in a new folder: metrics", _inherit, changes_folder=True, every=5)
OWN = Reader("resume: lock", _own, changes_folder=True)
OWNED = Reader("start beside an owner", lambda folder: RunFolder(folder / ONE).refuse_if_owned())
TELL = Reader(
    "write_status", lambda folder: RunFolder(folder / ONE).write_status("failed"), changes_folder=True, every=5
)
MIRROR = Reader("mirror note", lambda folder: read_note(folder / ONE))
REQUEUE = Reader("requeue", lambda folder: returns_without_progress(folder / ONE / "requeues.jsonl", 4))
TAG = Reader("runs tag", lambda folder: run_verb("runs", ["tag", ONE, "new"]), changes_folder=True, every=5)
LOGS = Reader("logs", lambda folder: run_verb("logs", [ONE]))

_SLURM = ("squeue", "scontrol", "sacct")  # queries a job; not found in the sandbox
Build = Callable[[Path, Path], None]


def _file(name: str, mutate: Mutate, *readers: Reader, build: Build = build_finished, **more: Any) -> Format:
    return Format(f"run/{name}", build, f"{ONE}/{name}", mutate, readers, **more)


FORMATS = (
    _file("status.json", mutate_json, LIST, STATUS, PAGE, COMPARE, LIBRARY, CLEAN, TELL, build=build_running),
    _file("notes.json", mutate_json, LIST, STATUS, LIBRARY, CLEAN, TAG),
    _file("metrics.jsonl", mutate_json_lines, STATUS, PAGE, COMPARE, COMPARE_JSON, LIBRARY, RECORD, INHERIT),
    _file("metrics.csv", mutate_csv, LIST, STATUS, LIBRARY),
    _file("results.json", mutate_json, PAGE, COMPARE, COMPARE_JSON, LIBRARY),
    _file("environment.json", mutate_json, LIST, STATUS, PAGE),
    _file("mirror.json", mutate_json, LIST, STATUS, MIRROR, TELL),
    _file("examples.json", mutate_json, PAGE),
    _file("failure.json", mutate_json, STATUS, build=build_running),
    _file("failures.jsonl", mutate_json_lines, LIST, STATUS, PAGE),
    _file("faults.jsonl", mutate_json_lines, PAGE),
    _file("requeues.jsonl", mutate_json_lines, LIST, STATUS, REQUEUE),
    _file("run.lock", mutate_json, LIST, STATUS, OWN, OWNED, build=build_running),
    _file(
        "job.json",
        mutate_json,
        LIST,
        STATUS,
        FIND,
        LOGS,
        build=build_submitted,
        may_run=("squeue", "scontrol", "sacct"),
    ),
)
