"""The commands, used like a user does, each in its own process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

import paceline as package
from harness.cli import command, paceline
from harness.runs import read_results, step_losses
from paceline.data.sources.shapes import CLASSES, make_shapes
from paceline.metrics.recorder import read_rows

QUICK = ["--num-samples=640", "--global-batch-size=64", "--log-frequency=1", "--epochs=2"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished two-rank run, used by many tests."""
    folder = tmp_path_factory.mktemp("a folder with spaces") / "it's a run"
    answer = paceline(
        "train", *QUICK, "--processes", "2", "--output-dir", str(folder), "--metric-lines", cwd=folder.parent
    )
    assert answer.code == 0, answer
    (folder.parent / "answer.txt").write_text(answer.out)
    return folder


def test_an_interrupt_inside_exec_keeps_its_exit_code(tmp_path: Path) -> None:
    # Dataclasses use exec. Python itself would end by the signal, for any return value of main.
    program = """
import paceline.launch.causes, paceline.metrics.screen  # loaded later, they would hide it
import paceline.cli.main as m
m._dispatch = lambda given: exec("raise KeyboardInterrupt")
m.console_main()
"""
    (tmp_path / "interrupted.py").write_text(program)
    answer = command(sys.executable, "-m", "interrupted", cwd=tmp_path)
    assert (answer.code, answer.err) == (130, "\ninterrupted\n")


def test_help_is_fast_and_imports_little(tmp_path: Path) -> None:
    def seconds_of_help() -> float:
        answer = paceline("train", "--help", cwd=tmp_path)
        assert answer.code == 0
        assert "--global-batch-size" in answer.out
        return answer.cpu_s

    # CPU time, the lowest of several: a busy machine takes more. torch would take 2 s.
    assert min(seconds_of_help() for _ in range(5)) < 0.2
    probe = "import sys; from paceline.cli.main import main; main(['train', '--help']); print(*sys.modules)"
    modules = command(sys.executable, "-c", probe, cwd=tmp_path).out.splitlines()[-1].split()
    assert "paceline.cli.train" in modules
    assert not {"torch", "numpy", "yaml", "rich"} & set(modules)


def test_the_first_lines_of_the_help(tmp_path: Path) -> None:
    assert "paceline train shapes-cnn" in paceline(cwd=tmp_path).out
    assert package.__version__ in paceline("--version", cwd=tmp_path).out
    assert "cifar10-vgg19" in paceline("recipes", cwd=tmp_path).out


def test_plan_shows_values_origins_and_numbers_and_starts_nothing(tmp_path: Path) -> None:
    flags = ["cifar10-vgg19", "--epochs", "3", "--processes", "2", "--global-batch-size", "512"]
    plan = paceline("plan", *flags, cwd=tmp_path)
    dry = paceline("train", *flags, "--dry-run", cwd=tmp_path)
    assert plan.code == dry.code == 0, plan

    def without_clock(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("  folder")]

    assert without_clock(plan.out) == without_clock(dry.out)
    lines = {line.split()[0]: " ".join(line.split()) for line in plan.out.splitlines() if line.strip()}
    assert lines["epochs"] == "epochs 3 flag --epochs"
    assert "cifar10-vgg19.yaml, line" in lines["dropout"]
    assert lines["label_smoothing"].endswith("default")
    assert "512 = 2 ranks x 256" in lines["batch"]
    assert "0.01 x 512 / 256 = 0.02" in lines["rate"]
    assert lines["parameters"] == "parameters 139,611,210"
    assert "3 epochs of 87, 261 in all" in lines["steps"]
    assert "per rank" in lines["memory"]
    assert list(tmp_path.iterdir()) == []


def test_first_line_says_ranks_backend_and_devices(run_folder: Path) -> None:
    first = (run_folder.parent / "answer.txt").read_text().splitlines()[0]
    assert "2 ranks by paceline" in first
    assert "gloo" in first
    assert "cpu" in first


def test_the_run_folder_has_the_documented_files(run_folder: Path) -> None:
    names = {path.name for path in run_folder.iterdir()}
    assert names >= {
        *("config.yaml", "environment.json", "status.json", "run.lock", "metrics.jsonl", "metrics.csv"),
        *("results.json", "tensorboard", "logs", "checkpoints"),
    }
    assert {path.name for path in (run_folder / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert json.loads((run_folder / "status.json").read_text())["status"] == "finished"
    assert json.loads((run_folder / "environment.json").read_text())["paceline"] == package.__version__
    results = read_results(run_folder)
    promised = "status test_accuracy test_loss best_epoch steps samples_per_second world_size strategy"
    assert set(results) >= {*promised.split(), "weights_sha256"}
    assert (results["status"], results["steps"], results["world_size"]) == ("finished", 18, 2)
    assert [entry["rank"] for entry in results["process_metrics"]] == [0, 1]
    assert sum(entry["samples"] for entry in results["process_metrics"]) == 18 * 64
    assert sum(map(sum, results["test"]["confusion_matrix"])) == 1000
    csv = (run_folder / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in csv[1:]] == [
        *(["1", "train"], ["1", "val"], ["2", "train"], ["2", "val"], ["2", "test"]),
    ]
    assert list((run_folder / "tensorboard").glob("events*"))


# The pattern by which the course's collect_results.py finds the lines.
COURSE_PATTERN = re.compile(r"\[METRIC\] epoch=(\d+) time=([\d\.]+) val_loss=([\d\.]+) acc=([\d\.]+) peak_mem=(\d+)MB")


def test_metric_lines_have_the_documented_form(run_folder: Path) -> None:
    """Every line matches completely, with the values of the epoch."""
    text = (run_folder.parent / "answer.txt").read_text()
    lines = [line for line in text.splitlines() if line.startswith("[METRIC]")]
    assert len(lines) == 2
    keys = [part.split("=")[0] for part in lines[0].split()[1:]]
    assert keys == ["epoch", "time", "val_loss", "acc", "peak_mem"]
    found = [COURSE_PATTERN.fullmatch(line) for line in lines]
    assert all(found), lines
    rows = [row for row in read_rows(run_folder / "metrics.jsonl") if row["kind"] == "epoch"]
    losses = [row["loss"] for row in rows if row["phase"] == "val"]
    assert [float(match[3]) for match in found if match] == [round(loss, 6) for loss in losses]
    peaks = [row["memory_peak_mb"] for row in rows if row["phase"] == "train"]
    assert [int(match[5]) for match in found if match] == [round(peak) for peak in peaks]


def test_step_rows_have_the_documented_fields(run_folder: Path) -> None:
    steps = [row for row in read_rows(run_folder / "metrics.jsonl") if row["kind"] == "step"]
    wanted = {"loss", "lr", "throughput", "data_wait", "memory_mb", "memory_peak_mb", "grad_norm", "accuracy"}
    assert len(steps) == 18
    assert all(set(row) >= wanted for row in steps)
    assert all(row["throughput"] > 0 and 0 <= row["data_wait"] <= 1 for row in steps)


def test_torchrun_joins_and_gives_the_same_bits(run_folder: Path, tmp_path: Path) -> None:
    answer = command(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "paceline", "train", *QUICK, "--output-dir", "joined"),
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert answer.code == 0, answer
    assert "2 ranks by torchrun" in answer.out
    assert step_losses(tmp_path / "joined") == step_losses(run_folder)
    assert read_results(tmp_path / "joined")["weights_sha256"] == read_results(run_folder)["weights_sha256"]


def test_fsdp_from_the_command_line_agrees_with_ddp(run_folder: Path, tmp_path: Path) -> None:
    answer = paceline("train", *QUICK, "--strategy", "fsdp", "--processes", "2", "--output-dir", "fsdp", cwd=tmp_path)
    assert answer.code == 0, answer
    assert step_losses(tmp_path / "fsdp") == pytest.approx(step_losses(run_folder), abs=1e-5)


def test_evaluate_gives_the_accuracy_of_the_run(run_folder: Path) -> None:
    answer = paceline("evaluate", str(run_folder), cwd=run_folder.parent)
    assert answer.code == 0, answer
    evaluation = json.loads((run_folder / "evaluation.json").read_text())
    assert evaluation["test_accuracy"] == read_results(run_folder)["test_accuracy"]
    assert f"{evaluation['test_accuracy']:.2%}" in answer.out


def test_predict_labels_pictures(run_folder: Path, tmp_path: Path) -> None:
    samples, _ = make_shapes(2, 42, stream=1)
    for number, sample in enumerate(samples):
        Image.fromarray(sample.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    answer = paceline("predict", str(run_folder), "0.png", "1.png", cwd=tmp_path)
    assert answer.code == 0, answer
    lines = answer.out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["0.png", "1.png"]
    assert all(any(name in line for name in CLASSES) and line.count("%") == 3 for line in lines)


def test_a_folder_with_a_run_is_not_overwritten(run_folder: Path) -> None:
    before = (run_folder / "metrics.jsonl").read_text()
    answer = paceline("train", *QUICK, "--output-dir", str(run_folder), cwd=run_folder.parent)
    assert answer.code == 2
    assert "already holds a run" in answer.err
    assert (run_folder / "metrics.jsonl").read_text() == before


def test_resume_auto_resumes_the_newest_run(tmp_path: Path) -> None:
    first = paceline("train", *QUICK, "--processes", "1", "--max-steps", "5", cwd=tmp_path)
    assert first.code == 0, first
    again = paceline("train", *QUICK, "--processes", "1", "--resume", "auto", cwd=tmp_path)
    assert again.code == 0, again
    assert "at step 5" in again.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(step_losses(folder)) == 18
    changed = paceline(*("train", *QUICK, "--processes", "1", "--resume", "auto", "--model-name", "mlp"), cwd=tmp_path)
    assert changed.code == 4
    assert "model_name: saved 'cnn', now 'mlp'" in changed.err


def test_rehearsal_runs_two_steps_of_every_part(tmp_path: Path) -> None:
    answer = paceline("train", "--rehearse", "--processes", "2", "--num-samples", "640", cwd=tmp_path)
    assert answer.out.count("\nmodel ") == 1, "one header"
    assert answer.code == 0, answer
    assert "rehearsal passed" in answer.out
    assert "resumed   at step 2" in answer.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert "rehearsal" in folder.name
    # An epoch has two steps here: the first part ends one, so its checkpoint is also the best.
    assert {path.name for path in folder.glob("checkpoints/step-*")} == {"step-00000002", "step-00000004"}
