"""MLflow runs: a sqlite database in the run folder, or the server named by MLFLOW_TRACKING_URI."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from paceline.metrics.sinks.base import CarefulSink, scalars_of
from paceline.settings.small_files import write_plain

EXPERIMENT = "paceline"
# MLflow's limits, from mlflow.utils.validation. A server refuses a whole batch that exceeds them.
MAX_KEY_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_PARAMS_PER_BATCH = 100


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
