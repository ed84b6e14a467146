"""`paceline replay`: what a run would be without some samples, or with other labels."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli.command import Command
from paceline.errors import EXIT_FINISHED, UserError
from paceline.settings.declare import Arg
from paceline.settings.tasks import SINGLE_LABEL

if TYPE_CHECKING:
    from paceline.settings.schema import DataConfig


@dataclass(frozen=True)
class ReplayRun:
    """Train a run again without some samples, or with other labels, from the last checkpoint before their first use.

    The new run is a run of its own: its `--exclude` names the samples. With --exact it has the same bits as a run from
    scratch that never had them, and its receipt shows which samples it never saw.
    """

    run: Annotated[str, Arg(place="word", completes="run")]
    """A run folder, or its name in runs/."""
    without: Annotated[str, Arg("SAMPLES", completes="file")] = ""
    """Training samples to leave out: numbers such as 3,17,20-29, or a file with numbers or names of pictures."""
    labels: Annotated[str, Arg("FILE", completes="file")] = ""
    """Other labels: a file with SAMPLE,LABEL lines, or 3=cat,17=dog."""
    output_dir: Annotated[str, Arg("DIR")] = ""
    """The folder of the new run; RUN-replay unless given."""
    processes: Annotated[str, Arg("N")] = "1"
    """Local processes to start."""
    dry_run: bool = False
    """Say which checkpoint and how many steps it takes, and start nothing."""


def replay(settings: ReplayRun) -> int:
    from paceline.launch.child import start_child
    from paceline.runs.catalog import find_run
    from paceline.runs.folder import RunFolder, require_run_folder
    from paceline.runs.trust import require_trusted_code
    from paceline.settings.load import load_config
    from paceline.settings.rules import check_config
    from paceline.tools.trust.without import find_cost, name_samples, train_arguments

    run = find_run(settings.run)
    require_run_folder(run.path)
    if not settings.without and not settings.labels:
        raise UserError("no samples are named", hint="--without SAMPLES, or --labels FILE")
    output = Path(settings.output_dir or f"{run.path}-replay")
    if RunFolder(output).holds_a_run and not settings.dry_run:
        raise UserError("this folder already holds a run", where=str(output), hint="another --output-dir")
    before = load_config(str(run.config), [])
    require_trusted_code(run.path, before.config)  # the data set may be a function
    from paceline.data.registry import load_dataset

    data = load_dataset(before.config.data, before.config.train.seed)
    without = name_samples(settings.without, data) if settings.without else ""
    after = load_config(str(run.config), _changes(before.config.data, without, settings.labels))
    check_config(after)
    cost = find_cost(run.path, before, after, data)
    for line in cost.describe():
        print(line, flush=True)
    if cost.first_use is None or settings.dry_run:
        return EXIT_FINISHED
    is_exact = before.config.parallel.exact
    if not is_exact:
        print("note      the run is not --exact: other ranks or threads than before round differently")
    lanes = (before.config.parallel.lanes or _ranks_of(run.results)) if is_exact else 0
    more = ["--processes", settings.processes]
    arguments = train_arguments(run.path, cost, after, output, lanes, more)
    print(f"command   {shlex.join(['paceline', *arguments])}\n", flush=True)
    with start_child(arguments) as child:
        code = child.wait()
    if code != EXIT_FINISHED:
        return code
    _report(run, RunFolder(output), cost.samples)
    return EXIT_FINISHED


def _changes(before: DataConfig, without: str, labels: str) -> list[str]:
    """Flags of train. The run may be a replay itself: its own changes stay."""
    from paceline.settings.samples import (
        excluded_ids,
        join_labels,
        new_labels,
        read_excluded,
        read_relabelled,
        shorten,
    )

    flags = []
    if without:
        more = excluded_ids(read_excluded(without, "flag --without"))
        flags += ["--exclude", shorten([*excluded_ids(before.exclude), *more])]
    if labels:
        other = new_labels(read_relabelled(labels, "flag --labels"))
        flags += ["--relabel", join_labels({**new_labels(before.relabel), **other})]
    return flags


def _ranks_of(results: Path) -> int:
    return int(_read(results).get("world_size") or 0)


def _read(path: Path) -> dict[str, Any]:
    from paceline.runs.json_files import read_object

    return read_object(path)


def _report(before: Any, after: Any, samples: list[int]) -> None:
    from paceline.tools.trust.without import compare_answers

    then, now = _read(before.results), _read(after.results)
    print(f"\n{'':<9} {'before':>12} {'after':>12} {'change':>12}")
    for name, label in (("test_accuracy", "accuracy"), ("test_loss", "loss")):
        if isinstance(then.get(name), float) and isinstance(now.get(name), float):
            print(f"{label:<9} {then[name]:>12.4f} {now[name]:>12.4f} {now[name] - then[name]:>+12.4f}")
    if then.get("task", SINGLE_LABEL) == SINGLE_LABEL:
        for line in compare_answers(before.path, after.path, samples):
            print(line)
    folder = shlex.quote(str(after.path))
    print(f"receipt   {after.receipt}: paceline verify {folder} checks that no step used the samples")


COMMANDS = (Command("replay", ReplayRun, replay),)
