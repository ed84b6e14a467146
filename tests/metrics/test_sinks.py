"""The trackers, read with their own packages: what a run writes, and that a resumed run repeats nothing.

A reader may find rows that the interrupted run wrote after its last checkpoint. No step may be there twice.
"""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.extras import need_packages
from paceline.metrics.sinks import MAX_PARAM_LENGTH, MlflowSink, WandbSink

CONFIG = {"base_lr": 0.1, "model": "resnet18", "clip_norm": None, "mean": (0.5, 0.5)}
STEPS_PER_EPOCH = 4
PHASES = ("train", "val", "test")
VALUES = ("loss", "accuracy", "throughput")


def step_row(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "step", "step": step, "loss": loss, "lr": 0.1, "grad_norm": None, "time": 1e9 + step}


def epoch_row(epoch: int, phase: str, loss: float = 1.0) -> dict[str, Any]:
    step = epoch * STEPS_PER_EPOCH
    values = {"loss": loss, "accuracy": 0.5, "throughput": 100.0}
    return {"kind": "epoch", "step": step, "epoch": epoch, "phase": phase, **values, "time": 1e9 + step}


def rows_of_epoch(epoch: int, loss: float = 1.0) -> list[dict[str, Any]]:
    first = (epoch - 1) * STEPS_PER_EPOCH
    steps = [step_row(step, loss) for step in (first + 2, first + 4)]
    return [*steps, epoch_row(epoch, "train", loss), epoch_row(epoch, "val", loss)]


def write_all(sink: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        sink.write(row)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cifar10-20260101-120000"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    # The sinks set these variables by default. Setting them here undoes that after the test.
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")


def import_or_skip(*names: str) -> None:
    """Import a package that a test needs, or skip the test. Warnings of the package itself are ignored."""
    need_packages(*dict.fromkeys(name.partition(".")[0] for name in names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(name)


# --- TensorBoard


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


@pytest.fixture
def tensorboard() -> None:
    import_or_skip(
        "torch",
        "tensorboard",
        "torch.utils.tensorboard",
        "tensorboard.backend.event_processing.event_accumulator",
    )


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_shows_every_phase(folder: Path) -> None:
    from paceline.metrics.sinks import TensorBoardSink

    sink = TensorBoardSink(folder, [])
    write_all(sink, [*rows_of_epoch(1), *rows_of_epoch(2), epoch_row(2, "test")])
    sink.close()

    shown = read_tensorboard(folder)
    assert set(shown) == {f"{phase}/{value}" for phase in PHASES for value in VALUES}
    assert shown["train/loss"] == [(1, 1.0), (2, 1.0)]
    assert shown["test/accuracy"] == [(2, 0.5)]
    steps = read_tensorboard(folder / "steps")
    assert set(steps) == {"step/loss", "step/lr"}  # grad_norm was not measured
    assert [step for step, _ in steps["step/loss"]] == [2, 4, 6, 8]


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_without_its_folder_is_one_warning(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is deleted during the run: no exception, no traceback of a thread, one line."""
    from paceline.metrics.sinks import TensorBoardSink

    sink = TensorBoardSink(folder, [])
    for row in rows_of_epoch(1):
        sink.write(row)
    shutil.rmtree(folder)
    for row in [*rows_of_epoch(2), *rows_of_epoch(3)]:
        sink.write(row)
    sink.close()
    assert "Traceback" not in capfd.readouterr().err
    assert [record.levelname for record in caplog.records if record.name == "paceline"] == ["WARNING"]


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_shows_no_epoch_twice_after_a_resume(folder: Path) -> None:
    from paceline.metrics.sinks import TensorBoardSink

    sink = TensorBoardSink(folder, [])
    # The checkpoint is of epoch 2. Epoch 3 and a part of 4 are lost.
    lost = [*rows_of_epoch(3, loss=9.0), step_row(14, loss=9.0)]
    write_all(sink, [*rows_of_epoch(1), *rows_of_epoch(2), *lost])
    sink.close()
    sink = TensorBoardSink(folder, [*rows_of_epoch(1), *rows_of_epoch(2)])
    write_all(sink, [*rows_of_epoch(3, loss=0.5), epoch_row(3, "test", loss=0.5)])
    sink.close()

    shown = read_tensorboard(folder)
    assert shown["train/loss"] == [(1, 1.0), (2, 1.0), (3, 0.5)]
    assert shown["val/loss"] == [(1, 1.0), (2, 1.0), (3, 0.5)]
    assert shown["test/loss"] == [(3, 0.5)]
    steps = read_tensorboard(folder / "steps")["step/loss"]
    assert steps == [(2, 1.0), (4, 1.0), (6, 1.0), (8, 1.0), (10, 0.5), (12, 0.5)]


# --- MLflow


@pytest.fixture
def mlflow_client(folder: Path) -> Iterator[Callable[[], Any]]:
    """Opens the package's own client with the database in the run folder, after the sink has created it."""
    import_or_skip("mlflow.tracking", "sqlalchemy", "alembic")
    from mlflow.tracking import MlflowClient

    # sqlalchemy's pooled connections close at garbage collection, and Python warns about it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield lambda: MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


def read_mlflow(client: Any, run_id: str) -> dict[str, list[tuple[int, float]]]:
    keys = client.get_run(run_id).data.metrics
    return {key: [(p.step, p.value) for p in client.get_metric_history(run_id, key)] for key in keys}


def only_mlflow_run(client: Any) -> Any:
    experiment = client.get_experiment_by_name("paceline")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1
    return runs[0]


def test_mlflow_stores_a_run_in_the_folder(folder: Path, mlflow_client: Callable[[], Any]) -> None:
    many = {f"field_{number}": number for number in range(150)}  # more than one batch can hold
    sink = MlflowSink(folder, {**CONFIG, "long": "x" * 10_000, "odd(key)": 1, **many})
    write_all(sink, [*rows_of_epoch(1), *rows_of_epoch(2), epoch_row(2, "test")])
    sink.close()

    assert (folder / "mlflow.db").exists()
    run = only_mlflow_run(mlflow_client())
    assert run.info.run_name == folder.name
    assert run.info.status == "FINISHED"
    assert run.info.artifact_uri.startswith((folder / "mlflow").as_uri())
    assert run.info.run_id == (folder / ".mlflow-run").read_text().strip()
    params = run.data.params
    assert {key: params[key] for key in CONFIG} == {key: str(value) for key, value in CONFIG.items()}
    assert len(params["long"]) == MAX_PARAM_LENGTH
    assert params["odd_key_"] == "1"
    assert params["field_149"] == "149"

    points = read_mlflow(mlflow_client(), run.info.run_id)
    epoch_keys = {f"{phase}/{value}" for phase in PHASES for value in VALUES}
    assert set(points) == epoch_keys | {"step/loss", "step/lr"}
    assert points["val/loss"] == [(4, 1.0), (8, 1.0)]
    assert points["test/accuracy"] == [(8, 0.5)]
    assert [step for step, _ in points["step/loss"]] == [2, 4, 6, 8]


def test_mlflow_resumes_the_same_run_and_repeats_no_step(folder: Path, mlflow_client: Callable[[], Any]) -> None:
    sink = MlflowSink(folder, CONFIG)
    # Killed (no close) between the train and the val row of epoch 3. The checkpoint is of epoch 2.
    lost = rows_of_epoch(3, loss=9.0)[:-1]
    write_all(sink, [*rows_of_epoch(1), *rows_of_epoch(2), *lost])
    sink = MlflowSink(folder, {**CONFIG, "base_lr": 0.2})  # a changed value must not stop it
    assert only_mlflow_run(mlflow_client()).info.status == "RUNNING"
    write_all(sink, [*rows_of_epoch(3, loss=0.5), *rows_of_epoch(4, loss=0.5)])
    sink.close()

    run = only_mlflow_run(mlflow_client())
    assert run.info.status == "FINISHED"
    assert run.data.params["base_lr"] == "0.1"
    points = read_mlflow(mlflow_client(), run.info.run_id)
    assert points["train/loss"] == [(4, 1.0), (8, 1.0), (12, 9.0), (16, 0.5)]  # 12 for the first time
    assert points["val/loss"] == [(4, 1.0), (8, 1.0), (12, 0.5), (16, 0.5)]
    assert [step for step, _ in points["step/loss"]] == [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.usefixtures("mlflow_client")
def test_mlflow_starts_a_new_run_if_the_store_does_not_know_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.tracking import MlflowClient

    MlflowSink(folder, CONFIG).close()
    other = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    sink = MlflowSink(folder, CONFIG)
    write_all(sink, rows_of_epoch(1))
    sink.close()

    run = only_mlflow_run(MlflowClient(tracking_uri=other))
    assert run.info.run_name == folder.name
    assert run.data.metrics["val/loss"] == 1.0
    assert caplog.records == []


@pytest.mark.usefixtures("mlflow_client")
def test_mlflow_without_its_server_gives_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # no server listens there
    caplog.set_level(logging.WARNING, logger="paceline")
    sink = MlflowSink(folder, CONFIG)
    write_all(sink, rows_of_epoch(1))
    sink.close()
    assert [record.name for record in caplog.records].count("paceline") == 1


# --- Weights & Biases


@pytest.fixture
def wandb() -> None:
    import_or_skip("wandb", "wandb.proto.wandb_internal_pb2")


def read_wandb(folder: Path) -> tuple[list[Any], list[tuple[int, dict[str, float]]]]:
    """The run records and the history of all offline files, oldest first.

    wandb has no reader for them. Their records are its own protobuf messages, in LevelDB's log format.
    """
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service writes the files, and may still write after finish()
    runs, history = [], []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for content in read_leveldb_log(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "run":
                runs.append(record.run)
            elif record.WhichOneof("record_type") == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                scalars = {key: value for key, value in values.items() if not key.startswith("_")}
                history.append((int(values["_step"]), scalars))
    return runs, history


def read_leveldb_log(data: bytes) -> Iterator[bytes]:
    """Records of a log: 32 KiB blocks of chunks, each with checksum, length and kind (complete or part)."""
    block, header, file_header = 32768, 7, 7
    at, record = file_header, b""
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + header])
        if kind == 0:
            return
        record += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


@pytest.mark.usefixtures("wandb")
def test_wandb_stores_an_offline_run_in_the_folder(folder: Path) -> None:
    sink = WandbSink(folder, CONFIG)
    write_all(sink, [*rows_of_epoch(1), *rows_of_epoch(2), epoch_row(2, "test")])
    sink.close()

    runs, history = read_wandb(folder)
    assert {run.run_id for run in runs} == {json.loads((folder / ".wandb-run").read_text())["id"]}
    assert {(run.project, run.display_name) for run in runs} == {("paceline", folder.name)}
    config = {item.key: item.value_json for item in runs[0].config.update}
    assert config["base_lr"] == "0.1"
    assert [step for step, _ in history] == [2, 4, 6, 8]
    assert history[0][1] == {"step/loss": 1.0, "step/lr": 0.1}
    epoch_keys = {f"{phase}/{value}" for phase in PHASES for value in VALUES}
    assert set(history[-1][1]) == epoch_keys | {"step/loss", "step/lr"}


@pytest.mark.usefixtures("wandb")
def test_wandb_resumes_the_same_run_and_repeats_no_step(folder: Path) -> None:
    sink = WandbSink(folder, CONFIG)
    lost = rows_of_epoch(3, loss=9.0)[:-1]  # ends between the train and the val row of epoch 3
    write_all(sink, [*rows_of_epoch(1), *rows_of_epoch(2), *lost])
    sink.close()
    sink = WandbSink(folder, {**CONFIG, "base_lr": 0.2})
    write_all(sink, [*rows_of_epoch(3, loss=0.5), *rows_of_epoch(4, loss=0.5)])
    sink.close()

    runs, history = read_wandb(folder)
    assert len({run.run_id for run in runs}) == 1
    points = [(key, step) for step, scalars in history for key in scalars]
    assert len(points) == len(set(points))
    losses = {step: scalars["train/loss"] for step, scalars in history if "train/loss" in scalars}
    assert losses == {4: 1.0, 8: 1.0, 12: 9.0, 16: 0.5}  # 12 for the first time
    losses = {step: scalars["val/loss"] for step, scalars in history if "val/loss" in scalars}
    assert losses == {4: 1.0, 8: 1.0, 12: 0.5, 16: 0.5}


# --- An error of a tracker never ends a run


def fake_modules(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Replace a package for the import. `a__b` stands for `a.b`."""
    for name, content in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


class FakeMlflowClient:
    """Accepts a run and its parameters, then fails at the second row."""

    def __init__(self, tracking_uri: str) -> None:
        self.rows = 0

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="1")

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.rows += bool(metrics)
        if self.rows > 1:
            raise ConnectionError("the server went away\nand a long story")

    def set_terminated(self, run_id: str) -> None:
        raise AssertionError("a quiet sink leaves the server alone")


class FakeWandbRun:
    """Fails at the second row."""

    id = "abc"

    def __init__(self) -> None:
        self.rows = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows += 1
        if self.rows > 1:
            raise ConnectionError("the server went away\nand a long story")

    def finish(self) -> None:
        raise AssertionError("a quiet sink leaves the server alone")


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ConnectionError("no server")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paceline"]


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker.invalid")
    entity = types.SimpleNamespace
    fake_modules(
        monkeypatch,
        mlflow={},
        mlflow__tracking={"MlflowClient": FakeMlflowClient},
        mlflow__entities={
            "Param": lambda key, value: entity(key=key, value=value),
            "Metric": lambda key, value, timestamp, step: entity(key=key, value=value, step=step),
        },
        mlflow__exceptions={"MlflowException": RuntimeError},
    )


@pytest.mark.usefixtures("fake_mlflow")
def test_mlflow_with_fake_package_stops_after_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = MlflowSink(folder, CONFIG)
    sink.write(step_row(1))
    assert warnings_of(caplog) == []
    write_all(sink, [step_row(2), step_row(3), epoch_row(1, "val")])
    sink.close()
    expected = "MLflow gets no more rows (ConnectionError: the server went away); metrics.jsonl has them all"
    assert warnings_of(caplog) == [expected]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("fake_mlflow")
def test_mlflow_with_fake_package_that_cannot_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeMlflowClient, "create_run", fail)
    sink = MlflowSink(folder, CONFIG)
    write_all(sink, rows_of_epoch(1))
    sink.close()
    assert len(warnings_of(caplog)) == 1
    assert not (folder / ".mlflow-run").exists()


@pytest.mark.usefixtures("fake_mlflow")
def test_mlflow_with_fake_package_names_the_missing_part_of_the_sqlite_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    MlflowSink(folder, CONFIG).write(step_row(1))
    (message,) = warnings_of(caplog)
    assert "sqlalchemy and alembic" in message


def test_wandb_with_fake_package_stops_after_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {}

    def init(**arguments: Any) -> FakeWandbRun:
        asked.update(arguments)
        return FakeWandbRun()

    fake_modules(monkeypatch, wandb={"init": init, "Settings": dict})
    sink = WandbSink(folder, CONFIG)
    assert (asked["mode"], asked["dir"], asked["id"]) == ("offline", str(folder), None)
    sink.write(step_row(1))
    assert warnings_of(caplog) == []
    write_all(sink, [step_row(2), step_row(3), epoch_row(1, "val")])
    sink.close()
    expected = "W&B gets no more rows (ConnectionError: the server went away); metrics.jsonl has them all"
    assert warnings_of(caplog) == [expected]

    monkeypatch.setenv("WANDB_MODE", "online")
    WandbSink(folder, CONFIG)
    assert (asked["mode"], asked["id"], asked["resume"]) == (None, "abc", "allow")


def test_wandb_with_fake_package_that_cannot_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_modules(monkeypatch, wandb={"init": fail, "Settings": dict})
    sink = WandbSink(folder, CONFIG)
    write_all(sink, rows_of_epoch(1))
    sink.close()
    assert len(warnings_of(caplog)) == 1
    assert not (folder / ".wandb-run").exists()
