"""`paceline equivalence`: one short training per world size, and whether they agree."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, PacelineError, UserError
from paceline.launch.child import start_child
from paceline.launch.request import read_request, require_folder
from paceline.metrics.recorder import read_rows
from paceline.models.external import PER_RANK, draws_per_rank
from paceline.runs.comparison import HASHES, SHORT_HASH, Row, largest_loss_difference
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace, claimed, new_place
from paceline.runtime.detect import count_gpu_ranks, read_rank_environment
from paceline.settings.declare import Arg, Range
from paceline.settings.load import LoadedConfig
from paceline.settings.rules import check_world
from paceline.settings.small_files import read_json_object

_DEFAULT_TOLERANCE = 1e-5
# Set unless they are given.
_QUICK = {"max_steps": ["--max-steps", "20"], "log_frequency": ["--log-frequency", "1"], "track": ["--track"]}
_MOST_RANKS = 1024


@dataclass(frozen=True)
class Equivalence(RecipeSettings):
    """Train a recipe for a few steps on each number of processes, one after the other, and say whether they agree.

    Takes the flags of `paceline train`, but not --processes. Unless given: --max-steps 20 --log-frequency 1, no
    trackers, and under --exact as many lanes as the largest number of processes.
    """

    world_sizes: Annotated[
        tuple[int, ...],
        Range(low=1, high=_MOST_RANKS),
        Arg(
            "N,N",
            many="commas",
            allowed=f"two or more different whole numbers from 1 up to {_MOST_RANKS}, with commas between them",
        ),
    ] = (1, 2, 4)
    """Numbers of processes."""
    tolerance: Annotated[float | None, Range(low=0)] = None
    """Largest difference of losses (1e-5 unless given; with --exact none)."""


@dataclass(frozen=True)
class Study:
    """The runs to make, all checked."""

    sizes: list[int]
    tolerance: float
    is_exact: bool
    is_sync_bn: bool
    draws_per_rank: bool  # an external model may: see models/external.py
    commands: dict[int, list[str]]  # of `paceline`, by world size
    folders: dict[int, Path]

    def accepts(self, outcome: ComparedRun) -> bool:
        """Whether a run gave the same result as the first one."""
        return outcome.loss_difference <= self.tolerance and (outcome.same_hashes or not self.is_exact)


@dataclass(frozen=True)
class ComparedRun:
    """One run, compared with the first."""

    size: int
    results: dict[str, Any]
    rows: list[Row]
    loss_difference: float
    same_hashes: bool

    @property
    def final_loss(self) -> float:
        return next(float(row["loss"]) for row in reversed(self.rows) if row["kind"] == "step")


def equivalence(settings: Equivalence) -> int:
    if read_rank_environment() is not None:
        raise UserError("equivalence starts its own processes", hint="call it without torchrun, or unset RANK")
    study = _plan_study(settings)
    _print_header(study)
    outcomes: list[ComparedRun] = []
    for size in study.sizes:
        code = _train(study.commands[size])
        if code != EXIT_FINISHED:
            print(f"the run on {_processes(size)} failed with exit code {code}; its folder is {study.folders[size]}")
            return code
        outcomes.append(_read_outcome(study, size, outcomes[0] if outcomes else None))
        _print_row(study, outcomes[-1])
    return _print_verdict(study, outcomes)


def _plan_study(settings: Equivalence) -> Study:
    """The command of every run, each checked as `paceline train` would check it."""
    sizes = list(settings.world_sizes)
    if len(sizes) < 2 or len(set(sizes)) < len(sizes):
        raise UserError(
            "at least two different world sizes are needed",
            where="flag --world-sizes",
            got=",".join(map(str, sizes)),
            hint="--world-sizes 1,2,4",
        )
    loaded = _read_common(settings, sizes)
    parallel = loaded.config.parallel
    if parallel.exact and settings.tolerance is not None:
        got = f"--tolerance {settings.tolerance:g}"
        raise UserError("exact runs are equal or not", got=got, hint="leave one out")
    tolerance = 0.0 if parallel.exact else _DEFAULT_TOLERANCE if settings.tolerance is None else settings.tolerance
    common = [word for name, words in _QUICK.items() if loaded.origin(name) != "flag" for word in words]
    if parallel.exact and not parallel.lanes:
        common += [f"--lanes={max(sizes)}"]
    require_folder(loaded, "equivalence")
    given = loaded.config.run.output_dir
    with claimed(RunPlace(Path(given), None) if given else new_place(loaded, prefix="equivalence-")) as place:
        folders = {size: place.folder / f"world-{size}" for size in sizes}
        every = ["train", *settings.as_arguments(), *common]
        commands = {size: [*every, f"--processes={size}", f"--output-dir={folders[size]}"] for size in sizes}
        for size in sizes:
            _check_run(commands[size][1:], size, folders[size])
        _check_devices(loaded, sizes)
    per_rank = draws_per_rank(loaded.config.model.model_name, is_exact=parallel.exact)
    return Study(sizes, tolerance, parallel.exact, parallel.sync_bn, per_rank, commands, folders)


def _read_common(settings: Equivalence, sizes: list[int]) -> LoadedConfig:
    """The request that all runs share."""
    loaded = read_request(settings.recipe, settings.flags)
    if loaded.origin("processes") == "flag":
        raise UserError(
            "equivalence decides the number of processes of each run",
            where=loaded.where("processes"),
            hint=f"--world-sizes {','.join(map(str, sizes))}",
        )
    if loaded.config.parallel.strategy == "single":
        raise UserError("strategy single runs on one process", where=loaded.where("strategy"), hint="--strategy auto")
    for name in ("resume", "rehearse"):
        if getattr(loaded.config.run, name):
            raise UserError("every run of an equivalence starts fresh", where=loaded.where(name), hint="leave it out")
    return loaded


def _check_run(arguments: list[str], size: int, folder: Path) -> None:
    try:
        check_world(read_request(arguments[0], arguments[1:]), size)
    except UserError as error:
        # The rules are written for `paceline train`, where --processes gives the number.
        error.hint = error.hint and error.hint.replace("--processes", "--world-sizes with")
        raise
    if folder.parent.exists() and not folder.parent.is_dir():
        raise UserError("output_dir is a file", where="flag --output-dir", got=str(folder.parent))
    if RunFolder(folder).holds_a_run:
        raise UserError("this folder already holds a run", where=str(folder), hint="another --output-dir")


def _check_devices(loaded: LoadedConfig, sizes: list[int]) -> None:
    room = count_gpu_ranks(loaded.config.parallel)
    if 0 < room < max(sizes):
        raise UserError(
            "more ranks than GPUs on this machine",
            where="flag --world-sizes",
            got=f"{max(sizes)} ranks, room for {room}",
            hint=f"--world-sizes up to {room}, or --device cpu, or --ranks-per-gpu {max(sizes)}",
        )


def _train(arguments: list[str]) -> int:
    """Run `paceline train` without output. If it fails, show its error."""
    with tempfile.TemporaryFile() as errors, start_child(arguments, stdout=subprocess.DEVNULL, stderr=errors) as child:
        code = child.wait()
        if code != EXIT_FINISHED:
            errors.seek(0)
            print(errors.read().decode("utf-8", "replace").strip(), file=sys.stderr)
    return code


def _read_outcome(study: Study, size: int, first: ComparedRun | None) -> ComparedRun:
    folder = RunFolder(study.folders[size])
    try:
        results = read_json_object(folder.results)
    except (OSError, ValueError) as error:
        raise PacelineError("a run ended without results", where=str(folder.path), got=str(error)) from error
    rows = read_rows(folder.metrics_jsonl)
    if first is None:
        return ComparedRun(size, results, rows, 0.0, same_hashes=True)
    same = all(results.get(name) == first.results.get(name) for name in HASHES)
    return ComparedRun(size, results, rows, largest_loss_difference(first.rows, rows), same)


def _print_header(study: Study) -> None:
    kind = "exact: every bit counts" if study.is_exact else f"losses may differ by {study.tolerance:g}"
    print(f"one training each on {', '.join(map(str, study.sizes))} processes; {kind}")
    if study.draws_per_rank:
        print(f"note: if an external model has any: {PER_RANK}")
    print()
    columns = f"{'world':>5}  {'final loss':>12}  {'largest difference':>18}  {'seconds':>7}  {'images/s':>8}"
    hashes = f"  {'weights':<{SHORT_HASH}}  {'optimizer':<{SHORT_HASH}}" if study.is_exact else ""
    print((columns + hashes).rstrip(), flush=True)


def _print_row(study: Study, outcome: ComparedRun) -> None:
    is_first = outcome.size == study.sizes[0]
    results = outcome.results
    difference = "-" if is_first else f"{outcome.loss_difference:.3g}"
    line = f"{outcome.size:>5}  {outcome.final_loss:>12.8f}  {difference:>18}"
    seconds, speed = results["training_seconds"], results["samples_per_second"]
    line += f"  {'-':>7}  {'-':>8}" if speed is None else f"  {seconds:>7.1f}  {speed:>8,.0f}"
    if study.is_exact:
        line += "".join(f"  {results[name][:SHORT_HASH]}" for name in HASHES)
    word = "" if is_first else "  same" if study.accepts(outcome) else "  DIFFERENT"
    print(line + word, flush=True)


def _print_verdict(study: Study, outcomes: list[ComparedRun]) -> int:
    first, *others = outcomes
    steps, base = first.results["steps"], study.folders[first.size].parent
    different = [outcome for outcome in others if not study.accepts(outcome)]
    if not different:
        how = "to the last bit" if study.is_exact else f"within {study.tolerance:g}"
        print(f"\nequivalent: {steps} steps give one answer on {_listed(study.sizes)} processes, {how}")
    else:
        sizes = _listed([outcome.size for outcome in different])
        print(f"\nNOT equivalent: {sizes} processes give another answer than {first.size}")
        if not study.is_exact and not study.is_sync_bn:
            print("a model with BatchNorm differs without --sync-bn or --exact: batch statistics are each rank's own")
        print(f"look closer: paceline compare {study.folders[first.size]} {study.folders[different[0].size]}")
    print(f"the runs are in {base}")
    return EXIT_DIFFERENT if different else EXIT_FINISHED


def _listed(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last


def _processes(size: int) -> str:
    return f"{size} process" + ("es" if size > 1 else "")


COMMANDS = (Command("equivalence", Equivalence, equivalence),)
