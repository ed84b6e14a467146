"""Writes docs/reference from the program itself: every flag, command, file and exit code.

    python docs/generate_reference.py            writes the pages
    python docs/generate_reference.py --check    says which are out of date, exit code 1

A flag, a file or an exit code that nobody has described is an error here, so none can be forgotten.
Imports no torch: what it reads are the schema, the errors and the names in a run folder.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from paceline import errors
from paceline.cli.main import VERBS, main
from paceline.config import schema
from paceline.config.fields import FieldSpec, field_table
from paceline.runs.folder import RunFolder

PAGES = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate_reference.py; change the program, then run it. -->\n"
WIDTH = 118
# Verbs with more than one page of help.
MORE_HELP = {"submit": ("slurm", "kubernetes")}

EXIT_CODES = {
    "EXIT_FINISHED": ("finished", "Nothing to do, or all of it done."),
    "EXIT_DIFFERENT": (
        "an answer you may not like",
        "`compare`, `equivalence`: the runs differ. `study`: a cell failed. `doctor`: a check failed. "
        "`course check`: not yet right.",
    ),
    "EXIT_USER": ("your mistake", "A flag, a recipe or a path is wrong; found before anything was started."),
    "EXIT_DATA": ("data", "A data set or a weights file is missing, cut off or unreadable."),
    "EXIT_CHECKPOINT": ("checkpoint", "One cannot be written, found or trusted, or belongs to another run."),
    "EXIT_NON_FINITE": ("not finite", "A loss or a gradient stopped being a number."),
    "EXIT_HANG": ("hang", "A rank stood still, and restarts did not help; `stacks/` says where."),
    "EXIT_OWNER_LOST": ("owner lost", "Another start has taken over the run; this one stopped writing and ended."),
    "EXIT_INTERNAL": ("internal", "A rank died too often without progress, or the fault is ours."),
    "EXIT_PREEMPTED": (
        "stopped and saved",
        "Asked to stop; start it again with `--resume auto`. Before the first step there is nothing to save: the same.",
    ),
    "EXIT_INTERRUPTED": (
        "interrupted",
        "Ctrl-C: saved if there was time. Also a command whose output pipe was closed; `train`, "
        "`study` and `equivalence` go on then.",
    ),
}

RUN_FILES = {
    "config.yaml": "the resolved config, defaults marked as such; is itself a recipe for the same run",
    "environment.json": "versions, git commit, host, command, the launcher's job",
    "data.json": "what the data was: numbers of samples, checksums, and changes accepted by `--accept-new-data`",
    "status.json": "running, preempted, finished or failed; step, time left, reason",
    "run.lock": "who owns the run: host, process, since when, and the id that its ranks carry",
    "metrics.jsonl": "the truth: a row per log interval, and per epoch and phase",
    "metrics.csv": "epoch, phase, loss, accuracy, throughput",
    "results.json": "what came of it, from all ranks: accuracy, times, limits, the weights' SHA-256",
    "examples.json": "pictures for the report",
    "report.html": "all of it on one page, which needs no network",
    "tensorboard/": "`{phase}/{loss,accuracy,throughput}` for TensorBoard",
    "logs/": "`rank-N.log`, one per rank, every attempt in one file; `supervisor.log`: what a lost console missed",
    "checkpoints/": "see below",
    "stacks/": "`attempt-A-rank-R.txt`: every rank's Python stack when something stood still",
    "failure.json": "the newest failure: rank, host, step, phase, traceback, the last lines of its log",
    "failures.jsonl": "all of them",
    "faults.jsonl": "what `--inject` has done so far",
    "requeues.jsonl": "each return of a Slurm job to its queue",
    "bad-batches/": "batches with a loss or gradient that was not finite, as safetensors with sample numbers",
}
OTHER_RUN_FILES = {
    "job.json": "the job of `paceline submit`: where, its id, its size",
    "job.sbatch": "its Slurm script, to be read and submitted by hand if you like",
    "job.yaml": "its Kubernetes manifest",
    "slurm-*.log": "what a Slurm job printed",
    "mirror.json": "the store the run is mirrored to, and how far that has come",
    "code.json": "keyed hashes of the functions that the run names: they mark its code as yours",
    "notes.json": "tags and note of `paceline runs tag` and `note`",
    "profile/": "`rank-N.json.gz`, traces for ui.perfetto.dev, and `top.txt`, with `--profile`",
    "evaluation.json": "the answer of `paceline evaluate`",
    "run.owner": "takes the place of `run.lock` on file systems without locks",
    "export-FORMAT/": "what `paceline export` writes: the model, `preprocessing.json`, labels, `card.md`",
    "mlflow.db": "the store of `--track mlflow`",
    "wandb/": "the offline run of `--track wandb`",
}
CHECKPOINT_FILES = {
    "step-00000700/": "one checkpoint, saved after step 700",
    "step-*/model.safetensors": "weights and buffers, by the model's own names",
    "step-*/optimizer.safetensors": "the optimizer's tensors, as `NAME/momentum_buffer`",
    "step-*/ema.safetensors": "the moving average, if the run keeps one",
    "step-*/statistics.safetensors": "each rank's own BatchNorm statistics, if there are any",
    "step-*/model-00000-of-00002.safetensors": "under FSDP: the slices of each rank; the same for optimizer and ema",
    "step-*/state.json": "everything that is not a tensor: step, sums of the epoch so far, best, scaler, config",
    "step-*/manifest.json": "size and CRC-32 of every file, and of itself; without it, it is no checkpoint",
    "latest": "link to the newest",
    "best": "link to the best by validation accuracy, then loss",
    "damaged-step-*/": "was found damaged and set aside",
    "superseded-step-*/": "kept for ever, but later than where the run went back to",
    ".tmp-step-*/": "a save in flight, or one that was killed; the next start removes it",
}
STUDY_FILES = {
    "study.json": "the grid and what all cells share",
    "cells/": "a run folder per cell and repeat",
    "jobs.json": "on Slurm: which array has which cells",
    "results.csv": "a row per cell and repeat",
    "report.html": "the answers, the plots and the tables on one page",
    "plots/": "the plots as PNG and SVG (extra `study`)",
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
    """Name to text of every page of the reference."""
    return {"flags.md": flags(), "commands.md": commands(), "files.md": files(), "exit-codes.md": exit_codes()}


def flags() -> str:
    """Every field of the schema, group by group, with its docstring."""
    told = _docstrings()
    table = field_table().values()
    parts = [
        "# Flags",
        f"{NOTE}\nEvery flag of `paceline train` is a line of a recipe too: `--global-batch-size 512` is "
        "`global_batch_size: 512`. Flags win over the recipe, the recipe over these defaults, and `paceline plan` "
        "shows who decided each value. A switch `--flip` is turned off by `--no-flip`. `plan`, `bench`, "
        "`equivalence`, `study` and `submit` take them as well; what a command has besides is in its "
        "[help](commands.md).",
    ]
    for group in dict.fromkeys(spec.group for spec in table):
        parts += [f"## {group}", told["Config", group]]
        for spec in (spec for spec in table if spec.group == group):
            # Two spaces end a line.
            parts += [f"### `{spec.flag}`", f"{told[_class_of(group), spec.name]}  \n*{_facts(spec)}*"]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """`--help` of every verb."""
    parts = [
        "# Commands",
        f"{NOTE}\nWhat `paceline COMMAND --help` prints. `--debug` before or after any of them shows tracebacks. "
        "Exit codes are on [a page of their own](exit-codes.md).",
        "| command | |\n|---|---|\n"
        + "\n".join(f"| [`paceline {verb}`](#paceline-{verb}) | {_cell(text)} |" for verb, text in VERBS.items()),
    ]
    for verb in VERBS:
        for words in [(verb,), *((verb, more) for more in MORE_HELP.get(verb, ()))]:
            text, takes_flags = _help(*words)
            parts += [f"{'#' * (1 + len(words))} paceline {' '.join(words)}", f"```text\n{text}\n```"]
            if takes_flags:
                parts.append("And the flags of `paceline train`: [flags](flags.md).")
    return "\n\n".join(parts) + "\n"


def files() -> str:
    """Every file of a run folder, a checkpoint and a study."""
    known = {_shown(path) for path in vars(RunFolder(Path("RUN"))).values() if isinstance(path, Path)} - {"RUN/"}
    _same("files of a run folder", known, set(RUN_FILES))
    return (
        "\n\n".join(
            [
                "# Files",
                f"{NOTE}\nA run is a folder of plain files, which any tool can read. Small files are replaced whole, "
                "so a reader never sees half of one. Not every run has all of them.",
                "## The run folder",
                "`runs/<recipe>-<time>/`, or `--output-dir`:",
                _file_table(RUN_FILES),
                "Where there is reason for them:",
                _file_table(OTHER_RUN_FILES),
                "## Checkpoints",
                "In `checkpoints/` of a run. The format is [told in full](../checkpoints.md).",
                _file_table(CHECKPOINT_FILES),
                "## A study",
                "`studies/<recipe>/`, or `--output-dir` ([studies](../guides/studies.md)):",
                _file_table(STUDY_FILES),
                "## Elsewhere",
                _file_table(
                    {
                        "~/.config/paceline/sites.yaml": "profiles of your clusters ([Slurm](../guides/slurm.md))",
                        "~/.cache/paceline/ceilings/": "limits of devices ([performance](../guides/performance.md))",
                        "~/.cache/paceline/compiled/": "what torch.compile made (`--compile`)",
                        "~/.cache/paceline/weights/": "published weights, downloaded",
                        "~/.cache/paceline/bytecode/": "Python's compiled modules, where an image keeps Python from"
                        " storing its own ([why](../decisions/0016-bytecode-in-our-cache.md))",
                        "packed.json, *.u8": "a packed data set ([data](../guides/own-data.md))",
                    }
                ),
            ]
        )
        + "\n"
    )


def exit_codes() -> str:
    """Every exit code, and the errors that lead to it."""
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
                f"{NOTE}\nThe code says who has to do something: 2 you, 75 whoever started it (start it again), "
                "70 perhaps us. A restart inside a run is no ending: the code is that of the last attempt.",
                "| code | | meaning | error |\n|---|---|---|---|\n" + "\n".join(rows),
                "Every error is one screen on standard error: what is wrong, `where`, `got`, `allowed` and what "
                "to `try`; `--debug` adds the traceback. The numbers are constants of `paceline.errors`.",
            ]
        )
        + "\n"
    )


def _facts(spec: FieldSpec) -> str:
    if spec.choices:
        expects = ("any of " if spec.is_tuple else "one of ") + ", ".join(f"`{choice}`" for choice in spec.choices)
    else:
        expects = spec.expects
    facts = [expects, f"default `{_written(spec.default)}`"]
    if spec.aliases:
        facts.append("also " + ", ".join(f"`--{alias.replace('_', '-')}`" for alias in spec.aliases))
    return "; ".join(facts)


def _written(value: object) -> str:
    """A default as one would write it behind its flag."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "(empty)"


def _docstrings() -> dict[tuple[str, str], str]:
    """(class, field) to the text under the field, which Python itself does not keep."""
    told: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for item, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                assert isinstance(item.target, ast.Name)
                told[node.name, item.target.id] = _cell(" ".join(str(after.value.value).split()))
    return told


def _class_of(group: str) -> str:
    return type(getattr(schema.Config(), group)).__name__


def _help(*words: str) -> tuple[str, bool]:
    """What a command prints for --help, without the boxes of train's flags; and whether it has them."""
    out = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}), contextlib.redirect_stdout(out):
        code = main([*words, "--help"])
    assert code == 0, f"paceline {' '.join(words)} --help ended with {code}"
    text, *flags = re.split(r"^(?:╭─)? options\b", out.getvalue(), maxsplit=1, flags=re.MULTILINE)
    return "\n".join(_wrapped(text.strip().splitlines())), bool(flags)


def _wrapped(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield from (
            textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
            if len(line) > WIDTH
            else [line.rstrip()]
        )


def _file_table(rows: dict[str, str]) -> str:
    return "| file | what it is |\n|---|---|\n" + "\n".join(
        f"| `{name}` | {_cell(text)} |" for name, text in rows.items()
    )


def _shown(path: Path) -> str:
    """A path below the run folder; folders end with a slash."""
    name = path.name
    return name if path.suffix else f"{name}/"


def _cell(text: str) -> str:
    """Text that Markdown leaves alone: no table, no tag, no emphasis by accident."""
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
