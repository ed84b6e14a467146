"""Reads the plain files of a run folder. Every file may be missing: a run may have just started, or have failed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.metrics.recorder import read_rows
from paceline.runs.file_shapes import ENVIRONMENT, EXAMPLES, FAILURE, FAULT, RESULTS, STATUS
from paceline.runs.folder import RunFolder
from paceline.runs.json_files import read_bounded, read_object, read_objects
from paceline.settings.fields import field_table, flatten
from paceline.settings.load import load_config
from paceline.settings.tasks import METRICS

Row = dict[str, Any]
_PLACES = ("output_dir",)  # not a setting of the training


@dataclass(frozen=True)
class RunFiles:
    folder: RunFolder
    state: str  # running, preempted, stopped, finished or failed; "unknown" without a status
    status: Row
    config: dict[str, Any]  # empty if it cannot be read
    config_text: str
    environment: Row
    results: Row  # empty for a run that did not finish
    rows: list[Row]
    failures: list[Row]
    faults: list[Row]
    examples: list[Row]

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def steps(self) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == "step"]

    def epochs(self, phase: str) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == "epoch" and row.get("phase") == phase]

    @property
    def own_metrics(self) -> list[str]:
        """Names of the user's own metrics, in rows and results: the FUNCTION of FILE.py:FUNCTION."""
        return [str(name).rpartition(":")[2] for name in self.config.get("metrics", ())]

    @property
    def shown_metrics(self) -> list[str]:
        """The metric that selects the best checkpoint, unless it is loss or accuracy, and the user's own."""
        chosen = str(self.config.get("best_by", "")).rpartition(":")[2]
        default = next(iter(METRICS.get(str(self.config.get("task")), {"": ""})))
        names = dict.fromkeys([chosen or default, *self.own_metrics])
        return [name for name in names if name not in ("", "loss", "accuracy")]

    @property
    def restarts(self) -> list[Row]:
        """Failures after which the run continued. The last failure of a failed run is not among them."""
        return self.failures[:-1] if self.state == "failed" else self.failures

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from their default: (value, default)."""
        defaults = {name: spec.default for name, spec in field_table().items()}
        return {
            name: (value, defaults[name])
            for name, value in self.config.items()
            if value != defaults[name] and name not in _PLACES
        }


def read_run(path: Path, state: str = "") -> RunFiles:
    """`state`: the state that will be written to status.json, if it is not written yet."""
    folder = RunFolder(path)
    status = read_object(folder.status, STATUS)
    state = state or str(status.get("status", "unknown"))
    config_text = _read_text(folder.config)
    return RunFiles(
        folder=folder,
        state=state,
        status=status,
        config=_read_config(folder.config),
        config_text=config_text,
        environment=read_object(folder.environment, ENVIRONMENT),
        # A run that is resumed after its end keeps its old results until it ends again.
        results=read_object(folder.results, RESULTS) if state in ("finished", "unknown") else {},
        rows=read_rows(folder.metrics_jsonl),
        failures=read_objects(folder.failures, FAILURE),
        faults=read_objects(folder.faults, FAULT),
        examples=_read_examples(folder.examples) if state == "finished" else [],
    )


def show_value(value: object) -> str:
    """A setting as the user would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _read_examples(path: Path) -> list[Row]:
    examples = read_object(path, EXAMPLES).get("examples", [])
    return [row for row in examples if row["picture"].startswith("data:image/")]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return flatten(load_config(str(path), []).config)
    except (PacelineError, OSError, SystemExit):  # a config of another version of paceline is shown as text
        return {}
