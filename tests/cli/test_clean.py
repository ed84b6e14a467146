"""`paceline clean` removes the right files after a question, and changes nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import shown
from harness.made_runs import add_checkpoints, dead_owner, elsewhere, hold, make_run
from paceline.launch.job_record import JobRecord
from paceline.runs.owner import this_process

USER, NOT_DONE = 2, 130
DAY_S = 86400.0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    add_checkpoints(make_run(folder / "done", step=30, age_s=9 * DAY_S), 10, 20, 30, best=10)
    add_checkpoints(make_run(folder / "failed", "failed", step=30, age_s=2 * DAY_S), 10, 20, 30, best=10)
    add_checkpoints(make_run(folder / "new", step=20), 10, 20)
    return folder


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_finished_run_keeps_its_best_checkpoint_and_a_stopped_one_its_newest_too(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "done/checkpoints/damaged-step-00000005").mkdir()
    (runs / "done/checkpoints/.tmp-step-00000031").mkdir()
    (runs / "done/checkpoints/mine.txt").write_text("not ours")
    before = files(runs / "done")
    text = shown(capsys, "clean", "done", "failed", "new", "--yes")
    assert (steps(runs / "done"), steps(runs / "failed"), steps(runs / "new")) == ([10], [10, 30], [20])
    assert "runs/done    finished " in text
    assert "4 checkpoints; step-00000010 stays" in text
    assert "1 checkpoint; step-00000010 and step-00000030 stay" in text
    gone = {name for name in before - files(runs / "done") if "/" not in name.removeprefix("checkpoints/")}
    names = ("step-00000020", "step-00000030", "damaged-step-00000005", ".tmp-step-00000031")
    assert gone == {f"checkpoints/{name}" for name in names}
    links = {name: str((runs / "done/checkpoints" / name).readlink()) for name in ("best", "latest")}
    assert links == {"best": "step-00000010", "latest": "step-00000010"}
    assert "nothing to free" in shown(capsys, "clean", "done", "failed", "new", "--yes")


def test_a_complete_checkpoint_is_always_kept(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damaged checkpoints do not count. Without a complete one everything is kept."""
    newest = runs / "failed/checkpoints/step-00000030/model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"y")  # only its checksum shows it
    for step in (10, 20):
        (runs / f"new/checkpoints/step-{step:08}/manifest.json").unlink()
    shown(capsys, "clean", "failed", "new", "--yes")
    assert (steps(runs / "failed"), steps(runs / "new")) == ([10, 20], [10, 20])


def test_sizes_are_those_on_the_disk(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = [path for step in (20, 30) for path in (runs / f"done/checkpoints/step-{step:08}").rglob("*")]
    size = sum(path.stat().st_size for path in gone)
    size += sum((runs / f"done/checkpoints/step-{step:08}").stat().st_size for step in (20, 30))
    text = shown(capsys, "clean", "done", "--yes")
    assert text.splitlines()[-1] == f"{size / 1000:.1f} kB freed"


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--older-than", "7d"], {"done"}),
        (["--older-than=1d"], {"done", "failed"}),
        (["--failed"], {"failed"}),
        (["--status", "finished"], {"done", "new"}),
        (["--older-than", "1w", "--failed"], set()),
        (["--recipe", "shapes-cnn", "--older-than", "36h"], {"done", "failed"}),
    ],
)
def test_flags_select_what_is_removed(
    flags: list[str], chosen: set[str], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(runs)
    shown(capsys, "clean", *flags, "--all", "--dry-run")
    assert files(runs) == before
    shown(capsys, "clean", *flags, "--all", "--yes")
    assert {path.name for path in runs.iterdir()} == {"done", "failed", "new"} - chosen


def test_running_runs_are_not_changed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, owner in (("here", this_process()), ("there", elsewhere()), ("lost", dead_owner())):
        folder = make_run(runs / name, "running", step=30, age_s=9 * DAY_S)
        add_checkpoints(folder, 10, 20, 30, best=10)
        hold(folder, owner)
    JobRecord("4711", "", "", []).write(make_run(runs / "queued", "running").path)
    (runs / "queued/status.json").unlink()
    text = shown(capsys, "clean", "--older-than", "0m", "--yes")
    assert [steps(runs / name) for name in ("here", "there", "lost")] == [[10, 20, 30], [10, 20, 30], [10, 30]]
    assert "runs/here" not in text
    for name in ("here", "there", "queued"):
        assert "may be under way" in shown(capsys, "clean", name, "--all", "--yes", code=USER)
        assert (runs / name).is_dir()
    assert "lost" in shown(capsys, "status", "lost"), "cleaning does not make the run look alive"


def test_a_run_that_starts_meanwhile_is_not_changed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from pathlib import Path; from paceline.runs import lock\n"
        "with lock.owned(Path(sys.argv[1])):\n"
        "    print('owned', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    # It holds the lock but has written no status yet: status.json still has the earlier end.
    lock = str(runs / "done/run.lock")
    with subprocess.Popen(
        [sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "owned\n"
        text = shown(capsys, "clean", "done", "new", "--all", "--yes")
        other.communicate("")
    assert "left alone: runs/done: another process is writing to this run folder" in text
    assert steps(runs / "done") == [10, 20, 30]
    assert not (runs / "new").exists()


def test_nothing_outside_of_run_folders_is_removed(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "scratch"
    outside.mkdir()
    add_checkpoints(make_run(tmp_path / "elsewhere"), 10, 20, best=20)
    (tmp_path / "elsewhere/checkpoints").rename(outside / "checkpoints")
    (tmp_path / "elsewhere/checkpoints").symlink_to(outside / "checkpoints")
    (runs / "link").symlink_to(tmp_path / "elsewhere")
    (runs / "done/data").symlink_to(outside)
    before = files(outside)
    assert "nothing to free" in shown(capsys, "clean", "elsewhere", "--yes")
    assert "not the run's own folder" in shown(capsys, "clean", "runs/link", "--all", "--yes", code=USER)
    shown(capsys, "clean", "--status", "finished", "--all", "--yes")
    assert {path.name for path in runs.iterdir()} == {"failed", "link"}
    assert "not a run folder" in shown(capsys, "clean", "scratch", "--all", "--yes", code=USER)
    assert "not a run folder" in shown(capsys, "clean", ".", "--all", "--yes", code=USER)
    assert "not a run folder" in shown(capsys, "clean", "runs", "--all", "--yes", code=USER)
    assert files(outside) == before


def test_clean_asks_and_a_script_must_pass_yes(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(runs)
    assert "a confirmation is needed" in shown(capsys, "clean", "done", code=USER)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer in ("", "n", "no", "yess"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert "nothing was removed" in shown(capsys, "clean", "done", "--all", code=NOT_DONE)
    assert files(runs) == before
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "y")
    shown(capsys, "clean", "done", "--all")
    assert questions == ["Remove 1 whole run? [y/N] "]
    assert not (runs / "done").exists()


def test_the_tag_keep_keeps_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "runs", "tag", "done", "keep")
    assert "left alone: 1 with the tag keep" in shown(capsys, "clean", "--older-than", "7d", "--all", "--yes")
    assert steps(runs / "done") == [10, 20, 30]
    shown(capsys, "clean", "done", "--yes")
    assert steps(runs / "done") == [10]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--all"], "no runs are chosen"),
        (["--older-than", "week"], "30m, 12h, 7d or 2w"),
        (["done", "--failed"], "give runs, or flags that choose them"),
        (["--failed", "--status", "finished"], "leave one of them out"),
        (["doen"], "not a run folder"),
        (["--oldr-than", "7d"], "perhaps you meant --older-than"),
    ],
)
def test_mistakes_of_clean_give_a_hint(
    arguments: list[str], part: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in shown(capsys, "clean", *arguments, code=USER)
