"""`report.html`: a run on one page, from the plain files of its folder."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import paceline
from paceline.reports import run_files
from paceline.reports.charts import Table
from paceline.reports.page import Block, Code, Details, Gallery, Picture, Section, Tile, Tiles, Tone, write_page
from paceline.reports.run_files import Row, RunFiles, limit_blocks, limit_tile, read_run, show_value
from paceline.runs.folder import RunFolder
from paceline.settings.tasks import METRICS, MINIMISED, MULTI_LABEL, REGRESSION, SINGLE_LABEL

_log = logging.getLogger("paceline")
_METRIC_NAMES = {
    "map": "mean average precision",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "f1": "F1",
    "top5": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy",
    "average_precision": "average precision",
}
_TONES: dict[str, Tone] = {"finished": "good", "failed": "bad", "preempted": "warn", "stopped": "warn", "running": ""}


def try_to_write_run_page(folder: RunFolder, state: str = "") -> None:
    """Write the page at the end of a run. An error here is a warning and never fails the run."""
    try:
        write_run_page(folder.path, state)
    except OSError as error:
        folder.warn_on_write_error(folder.report.name, error)
    except Exception as error:
        _log.warning("warning: %s cannot be made: %s: %s", folder.report.name, type(error).__name__, error)


def write_run_page(path: Path, state: str = "") -> Path:
    """`state`: the state that will be written to status.json, if it is not written yet."""
    run = read_run(path, state)
    sections = [
        Section("Key figures", _key_figures(run), "key-figures"),
        Section("Training", run_files.epoch_charts(run) + run_files.step_charts(run)),
        Section("Speed and memory", [*run_files.speed_charts(run), *limit_blocks(run), *_ranks(run)], "speed"),
        Section("Answers", _answers(run)),
        Section("Failures", _failures(run)),
        Section("Settings", _settings(run)),
        Section("Environment", _environment(run)),
    ]
    return write_page(
        run.folder.report,
        run.name,
        [section for section in sections if section.blocks],
        subtitle=_subtitle(run),
        verdict=verdict(run),
        tone=_TONES.get(run.state, "warn"),
        footer=f"Written by paceline {paceline.__version__} from the files in this folder.",
    )


# --- The top of the page


def verdict(run: RunFiles) -> str:
    """One sentence about the end of the run."""
    status, results = run.status, run.results
    test_text = _test_text(run)
    if run.state == "finished" and test_text:
        text = f"**Finished.** {test_text}"
        if results.get("best_epoch"):
            text += f", with the weights of epoch {results['best_epoch']}"
        return f"{text}; {_failures_text(run)}."
    step = status.get("step")
    at = f" at step {step:,}" if isinstance(step, int) else ""
    reason = f": {status['reason']}" if status.get("reason") else ""
    if run.state == "failed":
        return f"**Failed**{at}{reason}."
    if run.state in ("preempted", "stopped"):
        return f"**Stopped and saved**{at}{reason}. `{run.folder.resume_command}` continues from there."
    if run.state == "running":
        last = f" of {status['last_step']:,}" if isinstance(status.get("last_step"), int) else ""
        return f"**Not finished** when this page was written{at}{last}; {_failures_text(run)}."
    return f"It is not known how this run ended{at}."


def _test_text(run: RunFiles) -> str:
    """The result of the test in words; empty if there is none."""
    results, task = run.results, run.results.get("task", SINGLE_LABEL)
    metrics = results.get("test_metrics", {})
    count = results.get("test", {}).get("samples")
    of = f" of {count:,} test samples" if count else " of the test samples"
    if task == REGRESSION and metrics.get("mae") is not None:
        return f"The mean absolute error{of} is {metrics['mae']:.4g}"
    if task == MULTI_LABEL and metrics.get("map") is not None:
        return f"The mean average precision{of} is {metrics['map']:.2%}"
    accuracy = results.get("test_accuracy")
    return "" if accuracy is None else f"{accuracy:.2%}{of} are classified correctly"


def _failures_text(run: RunFiles) -> str:
    count = len(run.restarts)
    if not count:
        return "there were no failures"
    lost = sum(row.get("lost_steps") or 0 for row in run.restarts)
    return f"it survived {_count(count, 'failure')} and computed {_count(lost, 'step')} again"


def _subtitle(run: RunFiles) -> str:
    name, data = run.config.get("model_name"), run.config.get("dataset")
    what = f"{name} on {data}" if name and data else ""
    when = _when(run.status.get("updated"))
    return ", ".join(part for part in (what, when) if part)


def _key_figures(run: RunFiles) -> list[Block]:
    results = run.results
    tiles = [
        _tile(_accuracy_name(run), results.get("test_accuracy"), "{:.2%}", _loss_note(results.get("test_loss"))),
        *(_tile(f"test {name}", results.get("test_metrics", {}).get(name), "{:.4g}") for name in run.shown_metrics),
        _best_tile(run),
        _tile("images/s", results.get("samples_per_second"), "{:,.0f}", _speed_note(results)),
        limit_tile(run),
        _tile("training time", _duration(results.get("training_seconds")), "{}", _steps_note(run)),
        _tile("ranks", results.get("world_size"), "{}", _ranks_note(results)),
        _tile(
            "parameters", results.get("model_info", {}).get("parameters"), "{:,}", str(run.config.get("model_name", ""))
        ),
    ]
    if run.restarts:
        lost = sum(row.get("lost_steps") or 0 for row in run.restarts)
        tiles.append(
            Tile("restarts survived", str(len(run.restarts)), f"{_count(lost, 'step')} computed again", "warn")
        )
    shown = [tile for tile in [*_so_far(run), *tiles] if tile is not None]
    return [Tiles(shown)] if shown else []


def _accuracy_name(run: RunFiles) -> str:
    return "all labels right" if run.results.get("task") == MULTI_LABEL else "test accuracy"


def _so_far(run: RunFiles) -> list[Tile | None]:
    """Tiles of a run without results."""
    if run.results or not run.steps:
        return []
    last = run.steps[-1]
    return [
        _tile("steps", last["step"], "{:,}", "logged"),
        _tile("training loss", last.get("loss"), "{:.4f}", "at the last logged step"),
        _tile("images/s", last.get("throughput"), "{:,.0f}", "at the last logged step"),
    ]


def _tile(label: str, value: Any, form: str, note: str = "") -> Tile | None:
    return None if value is None else Tile(label, form.format(value), note)


def _best_tile(run: RunFiles) -> Tile | None:
    """The best epoch by the metric that selects checkpoints."""
    task = str(run.config.get("task", SINGLE_LABEL))
    given = str(run.config.get("best_by", ""))
    direction, is_own, name = given.rpartition(":")
    name = name or next(iter(METRICS[task]))
    sign = -1 if (direction if is_own else METRICS[task].get(name)) == MINIMISED else 1
    rows = [row for row in run.epochs("val") if row.get(name) is not None]
    if not rows:
        return None
    best = max(rows, key=lambda row: sign * row[name])
    value = f"{best[name]:.2%}" if name == "accuracy" else f"{best[name]:.4g}"
    note = "" if name == "accuracy" else f"{name}, "
    return Tile("best validation", value, f"{note}epoch {best.get('epoch')}")


def _loss_note(loss: float | None) -> str:
    return "" if loss is None else f"loss {loss:.4f}"


def _steps_note(run: RunFiles) -> str:
    steps, epochs = run.results.get("steps"), run.results.get("distributed_training", {}).get("epochs")
    return f"{_count(steps, 'step')}, {_count(epochs, 'epoch')}" if steps and epochs else ""


def _speed_note(results: Row) -> str:
    return str(results.get("speed_note") or "with validation and saving")


def _ranks_note(results: Row) -> str:
    about = results.get("distributed_training", {})
    return ", ".join(
        str(part) for part in (results.get("strategy"), about.get("backend"), about.get("precision")) if part
    )


# --- Its sections


def _ranks(run: RunFiles) -> list[Block]:
    ranks = run.results.get("process_metrics", [])
    columns = {
        "rank": "rank",
        "host": "host",
        "device": "device",
        "samples": "samples",
        "samples_per_second": "images/s",
        "data_wait_seconds": "waited for data (s)",
        "peak_memory_mb": "peak memory (MiB)",
    }
    if not ranks:
        return []
    rows = [[_cell(entry.get(key)) for key in columns] for entry in ranks]
    return [Table(list(columns.values()), rows, "Every rank, over the last attempt")]


def _cell(value: Any) -> str | float | int | None:
    if isinstance(value, float):
        return round(value, 1)
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _answers(run: RunFiles) -> list[Block]:
    blocks: list[Block] = [*_metrics_table(run), *run_files.class_charts(run), *_class_table(run)]
    found = run_files.mistakes(run)
    if found:
        rows: list[list[str | float | int | None]] = [
            [true, taken, count, f"{share:.1%}"] for true, taken, count, share in found
        ]
        table = Table(["class", "predicted as", "times", "share of the class"], rows)
        blocks.append(Details("The most frequent mistakes", [table], is_open=len(found) <= 5))
    wrong = [row for row in run.examples if row.get("true") != row.get("predicted")]
    right = [row for row in run.examples if row.get("true") == row.get("predicted")]
    if wrong:
        blocks += ["**Wrong with high confidence**: from the first rank's test pictures.", _gallery(wrong, "bad")]
    if right:
        blocks += ["**Right**: one of each class, where available.", _gallery(right, "good")]
    return blocks


def _metrics_table(run: RunFiles) -> list[Block]:
    """Every metric of the test."""
    metrics = {name: value for name, value in run.results.get("test_metrics", {}).items() if value is not None}
    rows: list[list[str | float | int | None]] = [[_in_words(name), f"{value:.4g}"] for name, value in metrics.items()]
    return [Table(["metric", "test"], rows, "Other metrics of the test")] if rows else []


def _class_table(run: RunFiles) -> list[Block]:
    """Precision and F1 of each class, beside the value of its chart."""
    test = run.results.get("test", {})
    columns = {name.removeprefix("class_"): values for name, values in test.items() if name.startswith("class_")}
    if len(columns) < 2:
        return []
    rows: list[list[str | float | int | None]] = [
        [str(label), *("no samples" if (v := column.get(label)) is None else f"{v:.2%}" for column in columns.values())]
        for label in next(iter(columns.values()))
    ]
    title = ", ".join(map(_in_words, columns))
    return [Details(f"{title[0].upper()}{title[1:]} by class", [Table(["class", *map(_in_words, columns)], rows)])]


def _in_words(name: str) -> str:
    """The name of a built-in metric. The user's own keep theirs."""
    return _METRIC_NAMES.get(name, name)


def _gallery(rows: list[Row], tone: Tone) -> Gallery:
    pictures = []
    for row in rows:
        true, predicted, share = str(row.get("true")), str(row.get("predicted")), row.get("confidence") or 0.0
        note = f"{share:.0%} sure" if true == predicted else f"is {true}; {share:.0%} sure"
        alt = f"a test picture of class {true}, labelled {predicted}"
        pictures.append(Picture(row["picture"], alt, predicted, note, tone))
    return Gallery(pictures)


def _failures(run: RunFiles) -> list[Block]:
    blocks: list[Block] = []
    if run.failures:
        rows: list[list[str | float | int | None]] = [
            [
                row.get("attempt"),
                _when(row.get("time")),
                row.get("rank"),
                row.get("step"),
                str(row.get("what", "")),
                row.get("lost_steps"),
                str(row.get("done", "")),
            ]
            for row in run.failures
        ]
        columns = ["attempt", "when", "rank", "step", "what happened", "steps lost", "what was done"]
        blocks.append(Table(columns, rows))
        blocks += [
            Details(f"Attempt {row.get('attempt')}: traceback", [Code(str(row["traceback"]))])
            for row in run.failures
            if row.get("traceback")
        ]
    if run.faults:
        injected = [[str(row.get("what", "")), row.get("rank"), row.get("attempt")] for row in run.faults]
        blocks.append(Table(["fault", "rank", "attempt"], injected, "Injected on purpose (`--inject`)"))
    return blocks


def _settings(run: RunFiles) -> list[Block]:
    if not run.config:
        return [Code(run.config_text)] if run.config_text else []
    changed = run.changed()
    rows = [[name, show_value(value), show_value(default)] for name, (value, default) in changed.items()]
    rest = [[name, show_value(value)] for name, value in run.config.items() if name not in changed]
    blocks: list[Block] = [Table(["setting", "value", "default"], rows, "Changed from the default")] if rows else []
    blocks.append(Details(f"{_count(len(rest), 'setting')} at the default", [Table(["setting", "value"], rest)]))
    return blocks


def _environment(run: RunFiles) -> list[Block]:
    about = run.environment
    if not about:
        return []
    git = about.get("git") or {}
    commit = str(git.get("commit", ""))[:12] + (", with changes" if git.get("dirty") else "")
    facts = {
        "paceline": about.get("paceline"),
        "python": about.get("python"),
        **{str(name): version for name, version in (about.get("packages") or {}).items()},
        "platform": about.get("platform"),
        "host": run.status.get("host"),
        "folder": about.get("folder"),
        "git commit": commit,
        "weights (SHA-256)": run.results.get("weights_sha256"),
    }
    rows = [[name, str(value)] for name, value in facts.items() if value]
    command = about.get("command") or []
    text = " ".join(map(str, command)) if isinstance(command, list) else str(command)
    return [Table(["what", "which"], rows), *([Code(text)] if text else [])]


# --- Text


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{seconds:.1f} s"


def _when(text: Any) -> str:
    try:
        return datetime.fromisoformat(str(text)).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""
