"""Write docs/reference from the program itself: every flag, command, file and exit code.

    python docs/generate_reference.py            write the pages
    python docs/generate_reference.py --check    list the pages that are out of date; exit code 1 if there are any

A flag, a file or an exit code without a description is an error, so none can be forgotten.
Imports no torch: it reads only the settings dataclasses, the errors and the names in a run folder.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from paceline import errors
from paceline.cli.command import Command, commands_of
from paceline.cli.main import VERBS
from paceline.launch.policy import FINAL_CAUSES
from paceline.runs.folder import RunFolder
from paceline.settings.command_line import help_text, written
from paceline.settings.declare import FieldSpec, collected_by, groups_of
from paceline.settings.schema import Config, field_table

PAGES = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate_reference.py: change the program, then run this script. -->\n"
WIDTH = 118

EXIT_CODES = {
    "EXIT_FINISHED": ("finished", "All work is done, or there was nothing to do."),
    "EXIT_DIFFERENT": (
        "negative answer",
        "`compare`, `bisect`, `equivalence`: the runs differ. `verify`: the run differs from its receipt. `study`, "
        "`sweep`: a cell failed. `doctor`: a check failed. `course check`: the answer is not right yet.",
    ),
    "EXIT_USER": ("user error", "A flag, a recipe or a path is wrong; usually found before any work starts."),
    "EXIT_DATA": ("data", "A data set or a weights file is missing, truncated or unreadable."),
    "EXIT_CHECKPOINT": ("checkpoint", "A checkpoint cannot be written, found or trusted, or belongs to another run."),
    "EXIT_NON_FINITE": ("not finite", "A loss or a gradient is NaN or infinite."),
    "EXIT_HANG": ("hang", "A rank made no progress, and restarts did not help; `stacks/` shows where."),
    "EXIT_CORRUPTION": (
        "wrong bits",
        "`--audit` found a rank that computes wrong bits, and the run cannot continue without its machine; "
        "`exclude.txt` names it.",
    ),
    "EXIT_OWNER_LOST": ("owner lost", "Another start has taken over the run; this one stopped writing and ended."),
    "EXIT_INTERNAL": ("internal", "A rank died too often without progress, or Paceline has a bug."),
    "EXIT_PREEMPTED": (
        "stopped and saved",
        "Stopped on request; start it again with `--resume auto`. Also before the first step, with nothing to save.",
    ),
    "EXIT_INTERRUPTED": (
        "interrupted",
        "Ctrl-C: saved if there was time. Also `watch` if the reader of its output leaves. No other command is "
        "interrupted by a closed pipe (`| head -1`): its exit code stays the same.",
    ),
}

RUN_FILES = {
    "config.yaml": "the resolved config, with defaults marked; it is a recipe for the same run",
    "environment.json": "versions, git commit, host, command, job of the launcher",
    "data.json": "what the data was: numbers of samples, checksums, and changes accepted by `--accept-new-data`",
    "status.json": "running, preempted (by a signal), stopped (by Ctrl-C), finished or failed; step, time left, reason",
    "run.lock": "the owner of the run: host, process, start time, and the id that its ranks have too",
    "steps.f64": "loss and gradient norm of every step: two little-endian float64 each",
    "checkpoints.jsonl": "SHA-256 hashes of every checkpoint that was saved, also of those that were dropped",
    "receipt.json": "a chain of hashes over the whole run, for [`paceline verify`](../guides/trust.md)",
    "metrics.jsonl": "a row per log interval, and per epoch and phase; other metrics files are made from it",
    "metrics.csv": "epoch, phase, loss, accuracy, throughput",
    "results.json": "the results over all ranks: task, metrics, times, start-up, limits, SHA-256 of the weights",
    "examples.json": "pictures for the report",
    "report.html": "the run on one page, which needs no network",
    "tensorboard/": "`{phase}/{loss,accuracy,throughput}` for TensorBoard",
    "logs/": "`rank-N.log`, one per rank, for all attempts; `supervisor.log`: output after the console was lost",
    "checkpoints/": "see below",
    "stacks/": "`attempt-A-rank-R.txt`: the Python stack of every rank at a hang",
    "failure.json": "the newest failure: [cause](exit-codes.md#causes), rank, host, step, phase, `is_restarted`, "
    "traceback, the last lines of its log",
    "failures.jsonl": "all failures",
    "faults.jsonl": "the faults that `--inject` has caused so far",
    "audit.jsonl": "what `--audit` found: rank, host, device, step, first wrong tensor",
    "exclude.txt": "the hosts that computed wrong bits, for `sbatch --exclude=$(cat exclude.txt)`",
    "requeues.jsonl": "each requeue of the Slurm job",
    "profile/": "`rank-N.json.gz`, traces for ui.perfetto.dev, and `top.txt`, with `--profile`",
    "bad-batches/": "batches with a loss or gradient that was not finite, as safetensors with sample numbers",
}
OTHER_RUN_FILES = {
    "job.json": "the job of `paceline submit`: cluster, id, size",
    "job.sbatch": "its Slurm script; you can also submit it by hand",
    "job.yaml": "its Kubernetes manifest",
    "slurm-*.log": "the output of a Slurm job",
    "mirror.json": "the store that the run is mirrored to, and the progress of it",
    "code.json": "keyed hashes of the functions that the run names; they prove that the code is yours",
    "functions.py": "the source of functions that ranks cannot import, from `paceline.train` in Python",
    "arrays/": "the data of `paceline.train(data=(x, y))`: `DIGEST/arrays.json` and `.npy` files of each part",
    "initial.safetensors": "the weights of a model that was given to `paceline.train` as an instance",
    "notes.json": "tags and note from `paceline runs tag` and `note`",
    "evaluation.json": "the result of `paceline evaluate`",
    "receipt.json.sig": "the signature of the receipt, by `paceline sign`",
    "run.owner": "replaces `run.lock` on file systems without locks",
    ".members/": "a record for the owner and for each rank: host, process, start time",
    "export-FORMAT/": "written by `paceline export`: the model, `preprocessing.json`, labels, `card.md`",
    "mlflow.db": "the store of `--track mlflow`",
    "wandb/": "the offline run of `--track wandb`",
}
CHECKPOINT_FILES = {
    "step-00000700/": "one checkpoint, saved after step 700",
    "step-*/model.safetensors": "weights and buffers, by the model's own names",
    "step-*/optimizer.safetensors": "the optimizer's tensors, as `NAME/momentum_buffer`",
    "step-*/ema.safetensors": "the moving average, if the run keeps one",
    "step-*/statistics.safetensors": "buffers that differ between ranks, such as BatchNorm statistics, if any",
    "step-*/model-00000-of-00002.safetensors": "under FSDP: the slices of each rank; the same for optimizer and ema",
    "step-*/state.json": "everything that is not a tensor: step, epoch sums, best, scaler, config, record of the model",
    "step-*/manifest.json": "size and CRC-32 of every file, and of itself; a folder without it is not a checkpoint",
    "latest": "link to the newest checkpoint",
    "best": "link to the best checkpoint, by `--best-by` (validation accuracy), then loss",
    "damaged-step-*/": "a checkpoint that was found damaged and moved aside",
    "superseded-step-*/": "later than the step that the run went back to; the next save deletes it unless it is kept",
    ".tmp-step-*/": "a save that is running, or that was killed; the next start removes it",
}
STUDY_FILES = {
    "study.json": "the grid, and the settings that all cells share",
    "cells/": "a run folder for each cell and repeat",
    "jobs.json": "on Slurm: which job array has which cells",
    "results.csv": "a row for each cell and repeat",
    "report.html": "the answers, the plots and the tables on one page",
    "plots/": "the plots as PNG and SVG (extra `study`)",
}
SWEEP_FILES = {
    "sweep.json": "the combinations, and the settings that all cells share",
    "cells/": "a run folder for each combination and seed",
    "jobs.json": "on Slurm: which job array has which cells",
    "sweep.csv": "a row for each run",
    "report.html": "the best combination, the charts and the table on one page",
    "plots/": "the charts as PNG and SVG (extra `study`)",
}


def main_generate(arguments: list[str]) -> int:
    stale = [name for name, text in pages().items() if _differs(PAGES / name, text)]
    if "--check" in arguments:
        for name in stale:
            print(f"out of date: docs/reference/{name}; run: python docs/generate_reference.py")
        return 1 if stale else 0
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")
    print(f"{len(pages())} pages, {len(stale)} of them new or changed")
    return 0


def pages() -> dict[str, str]:
    """The text of every page of the reference, by name."""
    return {"flags.md": flags(), "commands.md": commands(), "files.md": files(), "exit-codes.md": exit_codes()}


def flags() -> str:
    """Every field of the schema, by group, with its docstring."""
    table = field_table().values()
    parts = [
        "# Flags",
        f"{NOTE}\nEvery flag of `paceline train` is also a line of a recipe: `--global-batch-size 512` is "
        "`global_batch_size: 512`. Flags override the recipe, and the recipe overrides these defaults. `paceline plan` "
        "shows the origin of each value. `--no-flip` turns off the switch `--flip`. `plan`, `bench`, "
        "`equivalence`, `study`, `sweep`, `data look` and `submit` take these flags as well. The other flags of a "
        "command are in its [help](commands.md).",
    ]
    for group, text in groups_of(Config).items():
        parts += [f"## {group}", _cell(text)]
        for spec in (spec for spec in table if spec.group == group):
            # Two spaces end a line.
            parts += [f"### `{spec.flag}`", f"{_described(spec)}  \n*{_facts(spec)}*"]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """`--help` of every command."""
    parts = [
        "# Commands",
        f"{NOTE}\nThe output of `paceline COMMAND --help`. `--debug`, before or after any command, shows tracebacks. "
        "See also [exit codes](exit-codes.md).",
        "| command | |\n|---|---|\n"
        + "\n".join(f"| [`paceline {verb}`](#paceline-{verb}) | {_cell(text)} |" for verb, text in VERBS.items()),
    ]
    for verb, text in VERBS.items():
        if verb not in commands_of(verb):  # only a group of commands, as `paceline data`
            parts += [f"## paceline {verb}", f"{text[0].upper()}{text[1:]}."]
        for name, command in commands_of(verb).items():
            parts += [f"{'##' if ' ' not in name else '###'} paceline {name}", f"```text\n{_help(command)}```"]
            if Config in collected_by(command.settings).values():
                parts.append("It also takes the flags of `paceline train`: [flags](flags.md).")
    return "\n\n".join(parts) + "\n"


def files() -> str:
    """Every file of a run folder, a checkpoint and a study."""
    known = {_shown(path) for path in vars(RunFolder(Path("RUN"))).values() if isinstance(path, Path)} - {"RUN/"}
    _same("files of a run folder", known, set(RUN_FILES))
    return (
        "\n\n".join(
            [
                "# Files",
                f"{NOTE}\nA run is a folder of plain files, which any tool can read. Small files are replaced "
                "atomically, so a reader never sees a partial file. Not every run has all of them.",
                "## The run folder",
                "`runs/<recipe>-<time>/`, or `--output-dir`:",
                _file_table(RUN_FILES),
                "Some runs also have:",
                _file_table(OTHER_RUN_FILES),
                "## Checkpoints",
                "In `checkpoints/` of a run. See [the format](../checkpoints.md).",
                _file_table(CHECKPOINT_FILES),
                "## A study",
                "`studies/<recipe>/`, or `--output-dir` ([studies](../guides/studies.md)):",
                _file_table(STUDY_FILES),
                "## A sweep",
                "`sweeps/<recipe>/`, or `--output-dir` ([sweeps](../guides/sweeps.md)):",
                _file_table(SWEEP_FILES),
                "## Elsewhere",
                _file_table(
                    {
                        "~/.config/paceline/sites.yaml": "profiles of your clusters ([Slurm](../guides/slurm.md))",
                        "~/.cache/paceline/ceilings/": "limits of devices ([performance](../guides/performance.md))",
                        "~/.cache/paceline/compiled/": "results of torch.compile (`--compile`)",
                        "~/.cache/paceline/weights/": "published weights that were downloaded",
                        "~/.cache/paceline/bytecode/": "Python's compiled modules, if Python cannot"
                        " store them elsewhere ([why](../decisions/0016-bytecode-in-our-cache.md))",
                        "packed.json, *.u8, *.enc": "a packed data set ([data](../guides/own-data.md))",
                    }
                ),
            ]
        )
        + "\n"
    )


def exit_codes() -> str:
    """Every exit code, and the errors that cause it."""
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    _same("exit codes", set(codes), set(EXIT_CODES))
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    kinds = [kind for kind in classes if issubclass(kind, errors.PacelineError) and kind is not errors.PacelineError]
    rows = []
    for name, value in codes.items():
        short, text = EXIT_CODES[name]
        raised = ", ".join(f"`{kind.__name__}`" for kind in kinds if kind.exit_code == value)
        rows.append(f"| {value} | {short} | {_cell(text)} | {raised} |")
    return (
        "\n\n".join(
            [
                "# Exit codes",
                f"{NOTE}\nThe code says what to do next. 2: correct the command. 75: start it again, as schedulers do. "
                "70: it may be a bug of Paceline; report it. After restarts inside a run, the code is that of the last "
                "attempt.",
                "| code | | meaning | error |\n|---|---|---|---|\n" + "\n".join(rows),
                "Every error is one screen on standard error: what is wrong, `where`, `got`, `allowed` and what "
                "to `try`. `--debug` adds the traceback. The numbers are constants in `paceline.errors`.",
                "## Causes",
                "`cause` in `failure.json` and in the error of a child process. The supervisor restarts a run unless "
                "the failure would repeat.",
                "| cause | meaning | restart |\n|---|---|---|\n" + "\n".join(_cause_rows()),
            ]
        )
        + "\n"
    )


def _cause_rows() -> Iterator[str]:
    """The comment beside each cause is its description. Python itself does not keep it."""
    source = inspect.getsource(errors.Cause)
    texts = dict(re.findall(r'^    \w+ = "([a-z-]+)"  # (.+)$', source, re.MULTILINE))
    _same("causes", {str(cause) for cause in errors.Cause}, set(texts))
    for cause in errors.Cause:
        is_final = cause in FINAL_CAUSES or cause is errors.Cause.PREEMPTED
        yield f"| `{cause}` | {_cell(texts[cause])} | {'no' if is_final else 'yes'} |"


def _facts(spec: FieldSpec) -> str:
    if spec.choices:
        expects = ("any of " if spec.is_tuple else "one of ") + ", ".join(f"`{choice}`" for choice in spec.choices)
    else:
        expects = spec.expects
    facts = [expects, f"default `{written(spec.default) or '(empty)'}`"]
    if spec.aliases:
        facts.append("also " + ", ".join(f"`--{alias}`" for alias in spec.aliases))
    return "; ".join(facts)


def _described(spec: FieldSpec) -> str:
    if not spec.help:
        raise SystemExit(f"error: {spec.flag} has no description")
    return _cell(spec.help)


def _help(command: Command) -> str:
    """The help of a command without the flags of a recipe, which have their own page."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)}):
        return help_text(command.settings, command.name, without=(Config,))


def _file_table(rows: dict[str, str]) -> str:
    return "| file | what it is |\n|---|---|\n" + "\n".join(
        f"| `{name}` | {_cell(text)} |" for name, text in rows.items()
    )


def _shown(path: Path) -> str:
    """A path below the run folder; folders end with a slash."""
    name = path.name
    return name if path.suffix else f"{name}/"


def _cell(text: str) -> str:
    """Escape characters that Markdown would read as a table cell or a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _same(what: str, known: set[str], described: set[str]) -> None:
    if known != described:
        raise SystemExit(
            f"error: {what}: not described {sorted(known - described)}, described but gone {sorted(described - known)}"
        )


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    sys.exit(main_generate(sys.argv[1:]))
