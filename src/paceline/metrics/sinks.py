"""Trackers: TensorBoard, MLflow and Weights & Biases receive every metrics row. Packages are imported when needed."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import UserError
from paceline.runs.folder import RunFolder, write_json
from paceline.settings.extras import how_to_install
from paceline.settings.small_files import make_plain_folder, read_json_object, write_plain

EXPERIMENT = "paceline"
# MLflow's limits, from mlflow.utils.validation. A server refuses a whole batch that exceeds them.
MAX_KEY_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_PARAMS_PER_BATCH = 100
PROJECT = "paceline"
_PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


class Sink(Protocol):
    """Receives every metrics row as it is recorded."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class CarefulSink(ABC):
    """Wraps a third-party tracker. A failure never ends the run: it is reported once, and later rows are skipped."""

    name: str  # the name to display

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._is_quiet = False
        self._try(partial(self._open, folder, config))

    def write(self, row: dict[str, Any]) -> None:
        self._try(partial(self._log, row))

    def close(self) -> None:
        self._try(self._end)

    def _try(self, work: Callable[[], None]) -> None:
        if self._is_quiet:
            return
        try:
            work()
        except Exception as error:
            self._is_quiet = True
            reason = str(error).strip().partition("\n")[0]
            logging.getLogger("paceline").warning(
                "%s gets no more rows (%s: %s); metrics.jsonl has them all", self.name, type(error).__name__, reason
            )

    @abstractmethod
    def _open(self, folder: Path, config: dict[str, Any]) -> None: ...

    @abstractmethod
    def _log(self, row: dict[str, Any]) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers under the names trackers show: `train/loss`, `step/lr`."""
    prefix = row["phase"] if row["kind"] == "epoch" else "step"
    skipped = ("kind", "step", "epoch", "phase", "time", "ranks")
    return {f"{prefix}/{name}": value for name, value in row.items() if name not in skipped and value is not None}


# TensorBoard event files in the run folder, always written from all metrics rows.


class TensorBoardSink(CarefulSink):
    """Epoch rows use the epoch as x value, step rows the step.

    Event files can only be appended to. A resumed run rewrites them from the rows it keeps, so that no point appears
    twice and removed rows disappear.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, history: list[dict[str, Any]]) -> None:
        self._history = history
        super().__init__(folder, {})

    def _open(self, folder: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_plain_folder(folder)  # rmtree does not remove a link, and we must not write through it
        # Two sets of files, because TensorBoard draws epochs and steps on the same axis "step".
        self._writers = {"epoch": SummaryWriter(str(folder)), "step": SummaryWriter(str(folder / "steps"))}
        for row in self._history:
            self._add(row)

    def _log(self, row: dict[str, Any]) -> None:
        self._add(row)
        self._writers[row["kind"]].flush()

    def _add(self, row: dict[str, Any]) -> None:
        kind = row["kind"]
        for name, value in scalars_of(row).items():
            self._writers[kind].add_scalar(name, value, row[kind], walltime=row["time"])

    def _end(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _silence_writer_threads() -> None:
    """Hide the traceback of a TensorBoard thread that cannot write. The next write raises the same error."""
    before = threading.excepthook
    if getattr(before, "is_of_paceline", False):
        return

    def report(arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__module__.partition(".")[0] != "tensorboard":
            before(arguments)

    report.is_of_paceline = True  # type: ignore[attr-defined]
    threading.excepthook = report


# MLflow runs: a sqlite database in the run folder, or the server named by MLFLOW_TRACKING_URI.


class MlflowSink(CarefulSink):
    """One MLflow run per run folder; a resumed run continues it.

    The recorder does not repeat rows up to the resumed step. Rows after it may exist already: MLflow cannot delete
    points, so points that the interrupted run wrote after its last checkpoint stay. They are not written again. Every
    step has one point. For repeated steps, MLflow has the first values and `metrics.jsonl` the second.
    """

    name = "MLflow"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._run_id = ""
        self._points: set[tuple[str, int]] = set()  # points of an earlier process
        super().__init__(folder, config)

    def _open(self, folder: Path, config: dict[str, Any]) -> None:
        # Disable telemetry and long retries: the other ranks wait meanwhile. The user's own settings take precedence.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None
        if not uri:
            # mlflow-skinny alone fails here with a message about a model registry.
            if importlib.util.find_spec("sqlalchemy") is None or importlib.util.find_spec("alembic") is None:
                raise ModuleNotFoundError("MLflow's sqlite store needs the packages sqlalchemy and alembic")
            uri = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
            artifacts = (folder.resolve() / "mlflow").as_uri()

        from mlflow.tracking import MlflowClient

        # Creating the database logs many lines that are irrelevant to the run.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # Use a client instead of mlflow.start_run, which sets a process-wide active run.
        self._client = MlflowClient(tracking_uri=uri)
        id_file = folder / ".mlflow-run"
        if id_file.exists() and self._continue(id_file.read_text(encoding="utf-8").strip()):
            return
        experiment_id = self._experiment(artifacts)
        self._run_id = self._client.create_run(experiment_id, run_name=folder.resolve().name).info.run_id
        self._log_params(config)
        write_plain(id_file, f"{self._run_id}\n".encode())

    def _continue(self, run_id: str) -> bool:
        """Continue an earlier run; False if this store does not have it (another URI, or deleted)."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        if run.info.lifecycle_stage != "active":
            return False
        self._run_id = run_id
        # Do not log parameters again: MLflow refuses changes, and --epochs may have changed.
        self._client.update_run(run_id, status="RUNNING")
        for key in run.data.metrics:
            self._points.update((key, point.step) for point in self._client.get_metric_history(run_id, key))
        return True

    def _experiment(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            try:
                return str(self._client.create_experiment(EXPERIMENT, artifact_location=artifacts))
            except MlflowException:
                # On a shared server another run may have created it meanwhile.
                experiment = self._client.get_experiment_by_name(EXPERIMENT)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _log_params(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(re.sub(r"[^\w\-. /]", "_", key)[:MAX_KEY_LENGTH], str(value)[:MAX_PARAM_LENGTH])
            for key, value in config.items()
        ]
        for start in range(0, len(params), MAX_PARAMS_PER_BATCH):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS_PER_BATCH])

    def _log(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        step = int(row["step"])
        at_ms = int(row.get("time", time.time()) * 1000)
        metrics = [
            Metric(key, float(value), at_ms, step)
            for key, value in scalars_of(row).items()
            if (key, step) not in self._points
        ]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def _end(self) -> None:
        self._client.set_terminated(self._run_id)


# Weights & Biases runs: offline files in the run folder, or the mode in WANDB_MODE.


class WandbSink(CarefulSink):
    """One W&B run per run folder; a resumed run continues under the same id.

    Offline, every process writes its own `offline-run-*` folder, and `wandb sync` joins folders with the same id. W&B
    cannot delete points. Rows that the interrupted run wrote after its last checkpoint stay, and the resumed run does
    not write these steps again. Every step has one point. For repeated steps, W&B has the first values and
    `metrics.jsonl` the second. The last step of each kind of row is stored next to the id, because offline there is no
    server to query. A killed process may leave a gap of its last second or its last step, but never a duplicate.
    """

    name = "W&B"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._file = folder / ".wandb-run"
        self._written: dict[str, int] = {}  # the last step of each kind of row, kept for the next process
        super().__init__(folder, config)

    def _open(self, folder: Path, config: dict[str, Any]) -> None:
        mode = None  # use WANDB_MODE
        if not os.environ.get("WANDB_MODE"):
            mode = "offline"
            # Offline mode sends no crash reports either. wandb reads this when it is imported.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

        # Seconds until a row is on disk, 15 by default. Rows that a killed process has not flushed are lost to W&B.
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")

        import wandb

        run_id = self._read_earlier()
        self._run = wandb.init(
            project=PROJECT,
            name=folder.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=config,
            # Do not capture the console: the run has its own log files.
            settings=wandb.Settings(console="off", silent=True),
        )
        if self._run.id != run_id:
            self._written = {}
        self._keep()

    def _read_earlier(self) -> str | None:
        """Read the id of this folder's W&B run, if there is one, and fill `_written`."""
        try:
            earlier = read_json_object(self._file)
            self._written = {str(kind): int(step) for kind, step in earlier["written"].items()}
            return str(earlier["id"])
        except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):  # missing or invalid
            return None

    def _log(self, row: dict[str, Any]) -> None:
        kind = str(row.get("phase", "step"))
        if row["step"] <= self._written.get(kind, -1):
            return
        # W&B joins everything logged at one step: a step row and the following epoch rows become one entry.
        self._run.log(scalars_of(row), step=row["step"])
        self._written[kind] = row["step"]
        self._keep()

    def _keep(self) -> None:
        write_json(self._file, {"id": self._run.id, "written": self._written}, is_durable=False)

    def _end(self) -> None:
        self._run.finish()


# Open trackers by name, with a clear error if their package is missing.


def check_trackers(names: tuple[str, ...], *, where: str) -> None:
    """Raise UserError if the package of a chosen tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"the tracker {name} is not installed",
                where=where,
                hint=f"{how_to_install(name)}, or leave {name} out of --track",
            )


def open_sinks(
    names: tuple[str, ...], folder: RunFolder, config: dict[str, Any], *, history: list[dict[str, Any]]
) -> list[Sink]:
    """Open every tracker whose package is installed."""
    sinks: list[Sink] = []
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            logging.getLogger("paceline").info("no %s files: %s", name, how_to_install(name))
        elif name == "tensorboard":
            sinks.append(TensorBoardSink(folder.tensorboard, history))
        elif name == "mlflow":
            sinks.append(MlflowSink(folder.path, config))
        else:
            sinks.append(WandbSink(folder.path, config))
    return sinks
