"""`paceline runs`: the table, filters, tags and notes. `paceline train` with --quiet and --json."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from harness.cli import command, paceline, shown
from harness.fake_slurm import FakeSlurm, clean_home
from harness.made_runs import dead_owner, elsewhere, hold, make_run
from paceline.cli.runs import fit_columns
from paceline.launch.job_record import JobRecord

USER = 2
QUICK = [
    *("--num-samples=320", "--global-batch-size=32", "--log-frequency=3", "--epochs=2", "--track", "--processes=1"),
    "--omp-num-threads=1",
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs: the newest is running on another machine, the oldest was lost."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    make_run(runs / "a-finished", accuracies=(0.5, 0.875), step=840, test_accuracy=0.8125, age_s=300)
    make_run(runs / "b-failed", "failed", recipe="cifar10-cnn", accuracies=(0.25,), step=10, last_step=40, age_s=200)
    hold(make_run(runs / "c-running", "running", step=30, last_step=120, age_s=100), elsewhere())
    hold(make_run(runs / "d-lost", "running", step=3, last_step=12, age_s=400), dead_owner())
    return tmp_path


def names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()[1:]]


def test_the_table(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in shown(capsys, "runs").splitlines()]
    assert lines[0] == ["name", "recipe", "status", "progress", "best", "img/s", "age"]
    assert lines[1] == ["c-running", "shapes-cnn", "running", "30/120", "25%", "2", "min"]
    assert lines[2] == ["b-failed", "cifar10-cnn", "failed", "10/40", "25%", "~25.00%", "1,001", "3", "min"]
    assert lines[3] == ["a-finished", "shapes-cnn", "finished", "840", "81.25%", "1,002", "5", "min"]
    assert lines[4] == ["d-lost", "shapes-cnn", "lost", "3/12", "25%", "7", "min"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--status", "failed,lost"], ["b-failed", "d-lost"]),
        (["--recipe", "cifar10-cnn"], ["b-failed"]),
        (["cifar"], ["b-failed"]),
        (["A-FIN"], ["a-finished"]),
        (["--sort", "best"], ["a-finished", "b-failed", "c-running", "d-lost"]),
        (["--sort", "name", "--reverse", "--limit", "2"], ["d-lost", "c-running"]),
        (["--sort=status"], ["c-running", "a-finished", "b-failed", "d-lost"]),
    ],
)
def test_filters_and_orders(
    arguments: list[str], wanted: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(shown(capsys, "runs", *arguments)) == wanted


def test_json_has_all_fields(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(shown(capsys, "runs", "--json"))
    assert [row["state"] for row in rows] == ["running", "failed", "finished", "lost"]
    assert rows[2]["test_accuracy"] == 0.8125
    assert rows[0]["owner"].startswith("another-machine pid ")


def test_other_folders_and_missing_ones(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "empty").mkdir()
    assert "no runs in empty; paceline train shapes-cnn" in shown(capsys, "runs", "--in", "empty")
    assert names(shown(capsys, "runs", "--in", "."))[0] == "runs/c-running"
    assert "(4 searched)" in shown(capsys, "runs", "nothing like it")


def test_tags_and_notes_are_shown_in_every_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "#baseline  #keep" in shown(capsys, "runs", "tag", "a-fin", "baseline", "keep", "baseline")
    shown(capsys, "runs", "note", "runs/a-finished", "the first", "that learns")
    assert "#baseline  #keep  the first that learns" in shown(capsys, "runs", "--tag", "keep")
    assert names(shown(capsys, "runs", "learns")) == ["a-finished"]
    status = shown(capsys, "status", "a-finished")
    assert "  tags:     baseline keep\n  note:     the first that learns\n" in status
    assert "#keep" not in shown(capsys, "runs", "untag", "a-finished", "keep")
    shown(capsys, "runs", "note", "a-finished", "")
    assert json.loads((home / "runs/a-finished/notes.json").read_text()) == {"tags": ["baseline"], "note": ""}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--tag", "basline"], ["no run here has the tag 'basline'", "perhaps you meant baseline"]),
        (["--status", "fialed"], ["'fialed' is not valid", "--status failed"]),
        (["--sort", "speeed"], ["--sort speed"]),
        (["--recipe", "shape-cnn"], ["perhaps you meant shapes-cnn"]),
        (["--statsu", "failed"], ["unknown flag '--statsu'", "perhaps you meant --status"]),
        (["--limit", "-3"], ["limit is out of range"]),
        (["--in", "runz"], ["no such folder", "perhaps you meant runs"]),
        (["tag", "a-finishd", "x"], ["not a run folder", "perhaps you meant runs/a-finished"]),
        (["tag", "a-finished"], ["TAG is missing", "paceline runs tag RUN TAG..."]),
        (["tag", "a-finished", "two words"], ["cannot be a tag", "paceline runs note"]),
        (["untag", "a-finished", "baselin"], ["no tag 'baselin'", "perhaps you meant baseline"]),
    ],
)
def test_typing_errors_get_a_suggestion(
    arguments: list[str], parts: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(capsys, "runs", "tag", "a-finished", "baseline")
    screen = shown(capsys, "runs", *arguments, code=USER)
    assert screen.startswith("error: ")
    for part in parts:
        assert part in screen


def test_status_from_another_machine_through_the_folder(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"kind": "step", "step": 30, "loss": 1.5, "accuracy": 0.5, "throughput": 3105.4, "memory_mb": 412.4}
    (home / "runs/c-running/metrics.jsonl").write_text(json.dumps(row) + "\n")
    text = shown(capsys, "status", "c-running")
    assert text.startswith("runs/c-running: running, step 30 of 120 (25%)")
    assert "  now:      loss 1.5000, acc 50.0%, 3,105 img/s, 412 MB\n" in text
    make_run(home / "runs/e-silent", "running", step=3, age_s=7200)
    hold(make_run(home / "runs/e-silent", "running", step=3, age_s=7200), elsewhere())
    assert "reason:   no update for long" in shown(capsys, "status", "e-silent")
    assert names(shown(capsys, "runs", "--status", "silent")) == ["e-silent"]


def test_a_run_is_watched_by_its_fake_jobs_id_or_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean_home(home, monkeypatch)
    fake = FakeSlurm(home / "bin", monkeypatch)
    fake.answer("squeue", "4711|COMPLETED|None|2026-11-15T08:00:00|9:10|1:50:50|n[1-2]")
    script = home / "runs/a-finished/job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --job-name=night-run\n")
    JobRecord("4711", "", str(script), []).write(home / "runs/a-finished")
    for name in ("4711", "night-run"):
        assert shown(capsys, "watch", name).startswith("runs/a-finished: finished")
    assert "not a run folder" in shown(capsys, "watch", "4712", code=USER)


def test_a_thousand_runs_are_listed_quickly(tmp_path: Path) -> None:
    states = ("finished", "failed", "preempted", "running")
    made = [make_run(tmp_path / "made" / state, state, accuracies=(0.5,) * 20, step=7) for state in states]
    hold(made[-1], dead_owner())
    for number in range(1000):
        shutil.copytree(made[number % 4].path, tmp_path / "runs" / f"shapes-cnn-{number:04}", copy_function=os.link)

    def seconds() -> float:
        answer = paceline("runs", cwd=tmp_path)
        assert len(answer.out.splitlines()) == 1001
        return answer.cpu_s

    # Including the start of the command.
    assert min(seconds() for _ in range(3)) < 1.0
    probe = "import sys; from paceline.cli.main import main; main(['runs', '--limit=1']); print(*sys.modules)"
    modules = command(sys.executable, "-c", probe, cwd=tmp_path).out.splitlines()[-1].split()
    assert not {"torch", "numpy", "yaml"} & set(modules)


# --- The output of `paceline train` -----------------------------------------------------------------------------------


def test_quiet_prints_warnings_and_one_line(tmp_path: Path) -> None:
    flags = ["--quiet", "--output-dir=run", "--inject", "nan step=4", "--skip-nonfinite", "1"]
    answer = paceline("train", *QUICK, *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    accuracy = json.loads((tmp_path / "run/results.json").read_text())["test_accuracy"]
    (line,) = answer.out.splitlines()
    assert line.startswith(f"run: test accuracy {accuracy:.2%}, loss ")
    (warning,) = answer.err.splitlines()
    assert warning.startswith("warning: ")
    assert "skipped (1 of 1)" in warning
    (entry,) = json.loads(paceline("runs", "--in=.", "--json", cwd=tmp_path).out)
    assert (entry["recipe"], entry["state"], entry["step"]) == ("shapes-cnn", "finished", 18)


def test_a_name_that_the_terminal_cannot_encode_is_no_error(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "größe")
    answer = paceline("runs", cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert answer.code == 0, answer
    assert "gr\\xf6\\xdfe" in answer.out


def test_the_header_is_short(tmp_path: Path) -> None:
    lines = paceline(cwd=tmp_path).out.splitlines()
    assert len(lines) <= 8
    assert "paceline train shapes-cnn" in lines[2]
    assert "paceline --help" in lines[-1]


@pytest.mark.parametrize(
    ("room", "gone"),
    [
        (200, set()),
        (100, {"recipe", "restarts"}),
        (80, {"recipe", "restarts", "img/s", "tags"}),
        (60, {"recipe", "restarts", "img/s", "tags", "age", "progress"}),
        (30, {"recipe", "restarts", "img/s", "tags", "age", "progress"}),
    ],
)
def test_columns_are_dropped_one_by_one_in_a_narrow_window(room: int, gone: set[str]) -> None:
    widths = {"name": 28, "recipe": 11, "status": 9, "progress": 11, "best": 7, "img/s": 6, "restarts": 8, "age": 6}
    fitted = fit_columns({**widths, "tags": 60}, room)
    assert list(fitted) == [name for name in (*widths, "tags") if name not in gone]
    assert sum(fitted.values()) + 2 * (len(fitted) - 1) <= room


def test_an_ambiguous_prefix_lists_the_matching_names(tmp_path: Path) -> None:
    """Exit code 2, with the matching names. A longer prefix finds the run."""
    for name in ("ab-1", "ab-2", "b-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("epochs: 1\n")
    answer = paceline("status", "ab", cwd=tmp_path)
    assert answer.code == 2, answer
    assert "ab-1, ab-2" in answer.err
    assert "b-1," not in answer.err.replace("ab-1,", "")
    assert paceline("status", "ab-1", cwd=tmp_path).code == 0
