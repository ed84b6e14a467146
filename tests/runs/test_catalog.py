"""The catalog reads runs from their plain files, in every state, including broken ones."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.made_runs import dead_owner, elsewhere, hold, make_run
from paceline.errors import UserError
from paceline.launch.job_record import JobRecord
from paceline.runs.catalog import find_by_job, list_runs, locate_run, read_entry, read_last_step, recipe_of
from paceline.runs.folder import RunFolder
from paceline.runs.notes import Notes, check_tag, read_notes, write_notes
from paceline.runs.owner import this_process

HOUR_S = 3600.0


def test_a_finished_run(tmp_path: Path) -> None:
    make_run(tmp_path / "one", accuracies=(0.5, 0.75, 0.625), step=840, test_accuracy=0.7, age_s=HOUR_S)
    (entry,) = list_runs(tmp_path)
    assert (entry.name, entry.recipe, entry.state, entry.step) == ("one", "shapes-cnn", "finished", 840)
    assert (entry.best_accuracy, entry.test_accuracy, entry.accuracy) == (0.75, 0.7, 0.7)
    assert (entry.images_per_s, entry.progress, entry.restarts) == (1003, 1.0, 0)
    content = entry.to_json()
    assert json.loads(json.dumps(content)) == content
    assert (content["progress"], content["tags"], content["note"]) == (1.0, [], "")


@pytest.mark.parametrize("state", ["finished", "failed", "preempted", "stopped"])
def test_the_status_written_at_the_end_has_priority(state: str, tmp_path: Path) -> None:
    hold(make_run(tmp_path / "one", state, step=7), dead_owner())  # for example an earlier supervisor that was killed
    assert read_entry(tmp_path / "one").state == state


def test_a_run_with_an_owner_here_is_running_or_lost(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", "running", step=30, last_step=120, age_s=10 * HOUR_S)
    hold(folder, this_process())
    entry = read_entry(folder.path)
    assert (entry.state, entry.progress) == ("running", 0.25)
    hold(folder, dead_owner())
    assert read_entry(folder.path).state == "lost"
    folder.lock.write_text("")
    assert read_entry(folder.path).state == "lost", "the owner released it without a final status"


def test_an_owner_on_another_machine_counts_as_running_until_its_status_is_old(tmp_path: Path) -> None:
    for name, age_s, state in (("new", 60, "running"), ("old", HOUR_S, "silent")):
        folder = make_run(tmp_path / name, "running", age_s=age_s, step=3)
        # The same process id is dead on this machine. That is no evidence about the other machine.
        hold(folder, replace(elsewhere(), pid=dead_owner().pid, process_start="1"))
        assert read_entry(folder.path).state == state


def test_a_job_that_has_not_started(tmp_path: Path) -> None:
    (tmp_path / "queued").mkdir()
    JobRecord("4711", "", "", []).write(tmp_path / "queued")
    (entry,) = list_runs(tmp_path)
    assert (entry.state, entry.step, entry.progress) == ("submitted", None, None)


@pytest.mark.parametrize(
    ("noted", "state"),
    [
        ({"cancelled": "2026-11-18T05:00:00+00:00"}, "cancelled"),
        ({"outcome": "CANCELLED"}, "cancelled"),
        ({"outcome": "NODE_FAIL"}, "failed"),
        ({"outcome": "COMPLETED"}, "lost"),
        ({"outcome": "COMPLETED", "scheduler": "kubernetes"}, "finished"),
        ({"outcome": "FAILED", "scheduler": "kubernetes"}, "failed"),
    ],
)
def test_a_job_that_ended_before_its_run_wrote_a_file(noted: dict[str, Any], state: str, tmp_path: Path) -> None:
    JobRecord("4711", "", "", [], **noted).write(tmp_path)
    assert read_entry(tmp_path).state == state


def test_restarts_and_requeues_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", "failed")
    ends = ["started again from step 18 on 2 ranks", "started again from step 18 on 1 rank", "not started again: 2"]
    folder.failures.write_text("".join(json.dumps({"what": "x", "done": end}) + "\n" for end in ends))
    folder.requeues.write_text('{"reason": "SIGUSR1"}\n')
    assert read_entry(folder.path).restarts == 3


def test_runs_in_separate_folders_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "old", age_s=3 * HOUR_S)
    make_run(tmp_path / "project" / "sweep" / "new")
    make_run(tmp_path / "array" / "task-0", age_s=2 * HOUR_S)
    make_run(tmp_path / "array" / "task-1", age_s=HOUR_S)
    JobRecord("4711", "", "", [], array="0-1").write(tmp_path / "array")
    (tmp_path / "old" / "checkpoints" / "step-00000001").mkdir()
    (tmp_path / "not a run").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [entry.name for entry in list_runs(tmp_path)] == ["project/sweep/new", "array/task-1", "array/task-0", "old"]
    assert list_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize("name", ["status.json", "metrics.csv", "environment.json", "notes.json", "run.lock"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b"1,val\n1,val,x,y,z\n", b'{"status": 7}'])
def test_a_run_with_a_broken_file_is_listed(name: str, content: bytes, tmp_path: Path) -> None:
    make_run(tmp_path / "one-20261115-120000", "running", accuracies=(0.5,), step=3)
    (tmp_path / "one-20261115-120000" / name).write_bytes(content)
    (entry,) = list_runs(tmp_path)
    assert entry.recipe in ("shapes-cnn", "one")
    json.dumps(entry.to_json())


def test_a_recipe_without_a_record_is_taken_from_the_folder_name(tmp_path: Path) -> None:
    assert recipe_of(tmp_path / "cifar10-cnn-20261115-031810") == "cifar10-cnn"
    assert recipe_of(tmp_path / "cifar10-cnn-20261115-031810-2") == "cifar10-cnn"
    assert recipe_of(tmp_path / "shapes-cnn-rehearsal-20261115-031810") == "shapes-cnn"
    assert recipe_of(tmp_path / "mine") == "mine"


def test_a_run_is_found_by_its_job(tmp_path: Path) -> None:
    script = tmp_path / "two" / "job.sbatch"
    for name, job_id in (("one", "4711"), ("two", "4712")):
        make_run(tmp_path / name)
        JobRecord(job_id, "", str(script), [], earlier=["12"] if name == "one" else []).write(tmp_path / name)
    (tmp_path / "one" / "job.json").write_text(json.dumps({"job_id": "4711", "earlier": ["12"], "script": "gone"}))
    script.write_text("#!/bin/bash\n#SBATCH --job-name=night-run\n#SBATCH --time=1\n")
    assert find_by_job(tmp_path, "4712") == tmp_path / "two"
    assert find_by_job(tmp_path, "12") == tmp_path / "one"
    assert find_by_job(tmp_path, "night-run") == tmp_path / "two"
    assert find_by_job(tmp_path, "471") is None


def test_the_newest_complete_step_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_last_step(path) == {}
    rows = [{"kind": "step", "step": n, "loss": 2.0} for n in range(1, 2001)]
    end = '{"kind": "epoch", "step": 2000}\n{"kind": "step", "step": 20'
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    assert read_last_step(path) == rows[-1]


def test_tags_and_notes_are_in_a_plain_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    notes = Notes(("baseline", "lr/0.1"), "the first that learns")
    write_notes(folder.path, notes)
    assert json.loads((folder.path / "notes.json").read_text()) == {
        "tags": ["baseline", "lr/0.1"],
        "note": "the first that learns",
    }
    assert (
        read_notes(folder.path)
        == read_entry(folder.path).notes
        == Notes(("baseline", "lr/0.1"), "the first that learns")
    )
    write_notes(folder.path, Notes())
    assert not (folder.path / "notes.json").exists()
    for bad in ("", "two words", "-x", "a" * 41, "a\nb", "#x"):
        with pytest.raises(UserError):
            check_tag(bad)


def test_the_progress_of_a_stopped_run_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status("running", step=60, last_step=120)
    folder.write_status("preempted", step=60, reason="SIGTERM")
    folder.config.touch()
    assert read_entry(tmp_path).progress == 0.5
    folder.write_status("running", step=0)
    assert "last_step" not in folder.read_status(), "a new start may have another last step"


def test_a_run_is_found_by_path_name_or_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that takes a run accepts the same names."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs") / "größe eins"
    run.mkdir(parents=True)
    for name in (str(run), "größe eins", "grö"):
        assert locate_run(name) == run
    assert locate_run("nothing like it") == Path("nothing like it")


def test_the_command_that_resumes_a_run_can_be_pasted(tmp_path: Path) -> None:
    """A name with a space is quoted."""
    command = RunFolder(tmp_path / "int 9").resume_command
    assert command is not None
    assert shlex.split(command) == ["paceline", "train", str(tmp_path / "int 9" / "config.yaml"), "--resume", "auto"]
