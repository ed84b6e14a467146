"""The Runnable pipeline: the result of `paceline train`, a complete catalog, and retries that resume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.cli import environment, paceline
from harness.processes import kill_all_in, seconds_until_empty
from harness.runnable_pipelines import (
    EXAMPLE,
    STEPS,
    TINY,
    TINY_FLAGS,
    Pipeline,
    copy_example,
    plain_training,
    start_pipeline,
    undisturbed_pipeline,
)
from harness.runs import read_results, step_losses
from paceline.checkpoints.store import open_checkpoint
from paceline.metrics.recorder import read_rows

pytestmark = [pytest.mark.flows, pytest.mark.timeout(300)]  # on a busy machine
NEEDS = ("runnable",)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return undisturbed_pipeline(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_training(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A rank is killed in step 5, and restarts are disabled."""
    home = copy_example(tmp_path_factory.mktemp("killed"))
    faults = {"RUNNABLE_PRM_INJECT": "kill rank=1 step=5", "RUNNABLE_PRM_MAX_RESTARTS": "0"}
    return start_pipeline(home, "killed", **faults)


@pytest.fixture(scope="module")
def retried(killed: Pipeline) -> Pipeline:
    return start_pipeline(killed.home, "killed", RUNNABLE_RETRY_RUN_ID="killed")


LOGS = ["process_0_output.log", "process_1_output.log", "training_output.log"]


def read_json(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text())
    return content


# --- The same result


def test_losses_and_weights_equal_those_of_paceline_train(pipeline: Pipeline, plain: Path) -> None:
    assert len(step_losses(plain)) == STEPS
    assert step_losses(pipeline.folder) == step_losses(plain)
    for name in ("weights_sha256", "optimizer_sha256", "test_accuracy", "test_loss", "world_size"):
        assert read_results(pipeline.folder)[name] == read_results(plain)[name]
    assert read_results(plain)["world_size"] == 2


def test_the_environment_has_priority_over_the_parameters_file(pipeline: Pipeline) -> None:
    assert "batch_size: 32" in (pipeline.home / "tiny.yaml").read_text()
    config = yaml.safe_load((pipeline.catalog / "config.yaml").read_text())
    assert config["global_batch_size"] == 2 * 16
    assert config["base_lr"] == 0.004 * 256 / 32


def test_the_output_ends_with_the_result(pipeline: Pipeline) -> None:
    *_, recipe, accuracy, time, weights, folder = pipeline.answer.out.splitlines()
    assert recipe == f"recipe    synthetic-mlp on 2 ranks, {STEPS} steps"
    assert accuracy.startswith("accuracy  ")
    assert time.startswith("time      ")
    assert weights.endswith(str(read_results(pipeline.folder)["weights_sha256"]))
    assert folder == "folder    runs/undisturbed"


# --- The catalog


def test_the_catalog_is_complete(pipeline: Pipeline) -> None:
    names = {str(path.relative_to(pipeline.catalog)) for path in pipeline.catalog.rglob("*") if path.is_file()}
    assert names >= {
        "dataset_info.json",
        "distributed_training_results.json",
        "evaluation.json",
        "process_0_output.log",
        "process_1_output.log",
        "metrics_rank_0.json",
        "metrics_rank_1.json",
        "metrics.jsonl",
        "metrics.csv",
        "config.yaml",
        "environment.json",
        "report.html",
        "report.txt",
        "training_output.log",
        "distributed_model_checkpoint/manifest.json",
        "distributed_model_checkpoint/model.safetensors",
        "distributed_model_checkpoint/optimizer.safetensors",
        "distributed_model_checkpoint/state.json",
        "best_model_checkpoint/manifest.json",
        "best_model_checkpoint/model.safetensors",
        "epoch_2_checkpoint/manifest.json",
    }
    assert "epoch_1_checkpoint/manifest.json" not in names  # keep_every_epochs 2
    assert (pipeline.catalog / "report.html").read_bytes() == (pipeline.folder / "report.html").read_bytes()
    assert not any(name.endswith((".pt", ".pth", ".pkl", ".pickle")) for name in names)


def test_every_rank_has_metrics(pipeline: Pipeline) -> None:
    results = json.loads((pipeline.catalog / "distributed_training_results.json").read_text())
    ranks = [json.loads((pipeline.catalog / f"metrics_rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert results["process_metrics"] == ranks
    assert [entry["rank"] for entry in ranks] == [0, 1]
    assert [entry["samples"] for entry in ranks] == [STEPS * 16, STEPS * 16]
    assert results["performance"]["total_samples_processed"] == STEPS * 32
    assert results["success"] is True
    for rank in (0, 1):
        log = (pipeline.catalog / f"process_{rank}_output.log").read_text()
        assert log.startswith((pipeline.folder / "logs" / f"rank-{rank}.log").read_text())
        assert f"rank {rank} " in log
        assert log.count(" of this rank, ") == 2  # a line of each epoch
    assert "test accuracy" in (pipeline.catalog / "process_0_output.log").read_text()  # its console output


def test_each_rank_has_its_losses_accuracies_and_times_by_epoch(pipeline: Pipeline) -> None:
    """metrics_rank_R.json has the results of this rank's samples. Over the ranks they add up to the epoch's."""
    rows = [row for row in read_rows(pipeline.folder / "metrics.jsonl") if row.get("phase") == "train"]
    ranks = [json.loads((pipeline.catalog / f"metrics_rank_{rank}.json").read_text())["epochs"] for rank in (0, 1)]
    for number, row in enumerate(rows):
        parts = [epochs[number] for epochs in ranks]
        assert [part["epoch"] for part in parts] == [row["epoch"]] * 2
        assert [part["samples"] for part in parts] == [80, 80]
        assert [part["seconds"] for part in parts] == [row["seconds"]] * 2
        for name in ("loss", "accuracy"):
            assert sum(part[name] for part in parts) / 2 == pytest.approx(row[name], rel=1e-12)  # in another order
    assert ranks[0][0]["loss"] != ranks[1][0]["loss"]


def test_checkpoints_in_the_catalog_are_complete_and_the_test_names_its_checkpoint(pipeline: Pipeline) -> None:
    """The last and the best. `paceline evaluate` of the catalog's folder gives the pipeline's test accuracy."""
    assert open_checkpoint(pipeline.catalog / "distributed_model_checkpoint").step == STEPS
    assert open_checkpoint(pipeline.catalog / "epoch_2_checkpoint").step == STEPS
    tested = read_json(pipeline.catalog / "evaluation.json")
    assert tested["checkpoint"] == "best_model_checkpoint"
    best = open_checkpoint(pipeline.catalog / "best_model_checkpoint").step
    assert tested["step"] == best == STEPS // 2 * int(str(read_results(pipeline.folder)["best_epoch"]))
    answer = paceline("evaluate", str(pipeline.catalog / "best_model_checkpoint"), cwd=pipeline.home)
    assert answer.code == 0, answer
    assert f"test accuracy {tested['test_accuracy']:.2%}, loss {tested['test_loss']:.4f}" in answer.out


def test_data_in_the_catalog_is_the_training_data(pipeline: Pipeline) -> None:
    info = read_json(pipeline.catalog / "dataset_info.json")
    assert (info["train_samples"], info["validation_samples"], info["test_samples"]) == (160, 40, 1000)
    assert re.fullmatch("[0-9a-f]{16}", str(info["fingerprint"]))
    results = read_json(pipeline.catalog / "distributed_training_results.json")
    assert results["dataset"] == info


def test_runnable_tracks_the_metrics(pipeline: Pipeline) -> None:
    parameters = json.loads(pipeline.run_log.read_text())["parameters"]
    metrics = {name: entry["value"] for name, entry in parameters.items() if entry["kind"] == "metric"}
    last_epoch = [row for row in read_rows(pipeline.folder / "metrics.jsonl") if row.get("phase") == "train"][-1]
    assert metrics["avg_final_accuracy"] == last_epoch["accuracy"]
    assert metrics["test_accuracy"] == read_results(pipeline.folder)["test_accuracy"]
    assert 0 < metrics["total_training_time"] < read_results(pipeline.folder)["training_seconds"]
    assert set(metrics) == {"avg_final_accuracy", "total_training_time", "test_accuracy"}


def test_no_file_is_left_in_the_working_folder(pipeline: Pipeline) -> None:
    added = {path.name for path in pipeline.home.iterdir()} - {path.name for path in EXAMPLE.iterdir()}
    assert added - {"__pycache__"} == {"tiny.yaml", ".catalog", ".run_log_store", "runs"}


# --- Killed and retried


def test_a_training_that_fails_fails_the_pipeline_with_one_screen(killed: Pipeline) -> None:
    faults = [json.loads(line) for line in (killed.folder / "faults.jsonl").read_text().splitlines()]
    assert [fault["what"] for fault in faults] == ["kill (rank 1, step 5)"]
    assert killed.answer.code == 70
    screen = killed.answer.err[killed.answer.err.index("error: ") :]
    assert "a step of the pipeline failed" in screen
    assert "rank 1 was ended by SIGKILL" in screen
    assert "RUNNABLE_RETRY_RUN_ID=killed python pipeline.py" in screen
    assert not (killed.folder / "results.json").exists()
    assert not (killed.catalog / "distributed_training_results.json").exists()


def test_logs_of_the_failed_attempt_are_in_the_catalog(killed: Pipeline) -> None:
    # Before the retry: the run log has the files of the failed attempt.
    steps = json.loads(killed.run_log.read_text())["steps"]
    names = [entry["name"] for entry in steps["train"]["data_catalog"]]
    assert sorted(Path(name).name for name in names) == LOGS


def test_a_retry_resumes_from_the_checkpoint_to_the_same_weights(retried: Pipeline, pipeline: Pipeline) -> None:
    out = retried.answer.out
    assert retried.answer.code == 0, out[-3000:] + retried.answer.err
    assert "Skipping node prepare_data" in out
    assert "resumed   at step 4" in out
    assert step_losses(retried.folder) == step_losses(pipeline.folder)
    for name in ("weights_sha256", "optimizer_sha256", "test_accuracy"):
        assert read_results(retried.folder)[name] == read_results(pipeline.folder)[name]
    # The fault was injected once, over both starts.
    assert len((retried.folder / "faults.jsonl").read_text().splitlines()) == 1


def test_a_retried_run_counts_every_step_once(retried: Pipeline) -> None:
    results = json.loads((retried.catalog / "distributed_training_results.json").read_text())
    assert results["performance"]["total_samples_processed"] == STEPS * 32
    attempts = json.loads(retried.run_log.read_text())["steps"]["train"]["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["FAIL", "SUCCESS"]


@pytest.mark.parametrize("name", ["pipeline", "retried"])
def test_there_is_one_rate_and_the_times_of_epochs_add_up(name: str, request: pytest.FixtureRequest) -> None:
    """samples_per_second has one meaning everywhere, and time_per_epoch times the epochs is the training time."""
    results = json.loads((request.getfixturevalue(name).catalog / "distributed_training_results.json").read_text())
    performance, ranks = results["performance"], results["process_metrics"]
    rate = performance["total_samples_processed"] / performance["total_training_time"]
    assert results["samples_per_second"] == performance["samples_per_second"] == rate
    assert sum(entry["samples_per_second"] for entry in ranks) == pytest.approx(rate, rel=1e-12)
    assert performance["time_per_epoch"] * 2 == pytest.approx(performance["total_training_time"], rel=1e-12)
    assert sum(epoch["seconds"] for epoch in ranks[0]["epochs"]) == performance["total_training_time"]
    assert performance["learning_rate"] == pytest.approx(0.004, rel=1e-12)


def test_a_retry_names_the_variables_that_it_ignores(retried: Pipeline) -> None:
    assert retried.answer.out.startswith("note      a retry keeps the parameters of its first start")


LONG = [*TINY_FLAGS, "--epochs=2000", "--processes=2", "--output-dir=run"]
CHILD = f"""
from pathlib import Path
from paceline.integrations.runnable.child import run_paceline
exit(run_paceline(["train", *{LONG!r}], Path("log.txt")))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_training_saves_and_ends_with_its_pipeline(number: signal.Signals, tmp_path: Path) -> None:
    """If the pipeline's process forwards a signal, and if it is killed before it can."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as step:
        try:
            assert step.stdout is not None
            assert any(line.startswith("step ") for line in step.stdout)
            os.kill(step.pid, number)
            code = step.wait(60)
            seconds_until_empty(tmp_path, limit_s=60)
        finally:
            kill_all_in(tmp_path)
    assert code == (75 if number == signal.SIGTERM else -number)
    assert read_json(tmp_path / "run" / "status.json")["status"] == "preempted"


# --- Argo


def test_argo_form_compiles_to_one_pod_per_step(tmp_path: Path) -> None:
    home = copy_example(tmp_path)
    answer = start_pipeline(home, "", RUNNABLE_CONFIGURATION_FILE="argo.yaml", RUNNABLE_RUN_ID="").answer
    assert answer.code == 0, answer.out[-3000:] + answer.err
    workflow = yaml.safe_load((home / "argo-pipeline.yaml").read_text())
    assert (workflow["apiVersion"], workflow["kind"]) == ("argoproj.io/v1alpha1", "Workflow")
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    tasks = templates[workflow["spec"]["entrypoint"]]["dag"]["tasks"]
    commands = [templates[task["template"]]["container"]["command"] for task in tasks]
    names = [words[words.index("pipeline.main") + 1] for words in commands]
    assert names == ["prepare_data", "train", "aggregate", "evaluate", "report", "success"]
    before = [task["depends"].removesuffix(".Succeeded") for task in tasks]
    assert before == ["", *(task["name"] for task in tasks[:-1])]
    volumes = {volume["name"] for volume in workflow["spec"]["volumes"]}
    for task in tasks:
        container = templates[task["template"]]["container"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["command"][:2] == ["runnable", "execute-single-node"]
        assert container["command"][-1] == "tiny.yaml"  # no path of this machine
    train = templates[tasks[1]["template"]]["container"]
    assert train["resources"]["limits"]["cpu"] == "4"
    given = {entry["name"]: entry.get("value") for entry in workflow["spec"]["arguments"]["parameters"]}
    assert given["world_size"] == yaml.safe_load(TINY)["world_size"]
    assert not (home / "runs").exists()
