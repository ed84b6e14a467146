"""An outage of the storage is not damage: no checkpoint is renamed, deleted or skipped because of it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.finished_run import BEFORE, FLAGS, NEWEST
from harness.cli import command, environment, paceline
from harness.ranks import make_world
from harness.runs import QUICK, read_results
from harness.short_run import FLAGS as TRAIN
from harness.short_run import STEPS, injected_faults, outcome, run_undisturbed
from paceline.checkpoints import store
from paceline.checkpoints.format import step_folders
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention, find_newest, open_checkpoint, prune, read_verified
from paceline.errors import EXIT_CHECKPOINT
from paceline.runs.folder import has_checkpoint
from paceline.runs.patience import PATIENCE, UnreadableNow

ERRORS = [
    *(errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.EHOSTDOWN, errno.EBUSY, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO),
]
OUTAGE = Path(__file__).parent / "outage"


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every name below a folder with its inode, mode, size and time of change."""
    found = {path: path.lstat() for path in [folder, *sorted(folder.rglob("*"))]}
    return {str(path): (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns) for path, s in found.items()}


class FakeOutage:
    """Calls that fail for some paths, a number of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, number: int, match: str, times: int) -> None:
        self.left = times
        original = getattr(os, call)

        def fail(path: Any = ".", *rest: Any, **named: Any) -> Any:
            if match in str(path) and self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number))
            return original(path, *rest, **named)

        monkeypatch.setattr(os, call, fail)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, "0.02")
    monkeypatch.setattr(store, "RETRY_PAUSE_S", 0.0)


READS: dict[str, Callable[[Path], object]] = {
    "newest": lambda run: find_newest(run / "checkpoints"),
    "best": lambda run: find_newest(run / "checkpoints", prefer_best=True),
    "named": lambda run: open_checkpoint(run / "checkpoints" / NEWEST),
    "as verified": lambda run: read_verified(run / "checkpoints" / NEWEST),
    "begin at zero": lambda run: open_manager(run).begin_at_zero(run, may_drop_damaged=True),
    "choose": lambda run: open_manager(run).choose(run),
}


def open_manager(run: Path) -> CheckpointManager:
    return CheckpointManager(
        run / "checkpoints", make_world(0, 1), is_sharded=False, retention=Retention(keep_last=4), is_async=False
    )


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("file", ["manifest.json", "state.json", "model.safetensors"])
def test_fake_error_on_a_file_is_not_damage(run: Path, monkeypatch: pytest.MonkeyPatch, number: int, file: str) -> None:
    """No storage error makes the owner rename the newest checkpoint or use an older one."""
    store.point(run / "checkpoints", "best", run / "checkpoints" / NEWEST)
    before = snapshot(run / "checkpoints")
    with monkeypatch.context() as patch:
        FakeOutage(patch, "open", number, f"{NEWEST}/{file}", times=-1)
        for name, read in READS.items():
            if name == "as verified" and file == "model.safetensors":
                continue  # the primary has read these
            with pytest.raises(UnreadableNow) as caught:
                read(run)
            assert caught.value.exit_code == EXIT_CHECKPOINT
            assert caught.value.got == os.strerror(number)
    assert snapshot(run / "checkpoints") == before
    newest, rejected = find_newest(run / "checkpoints")
    assert newest is not None
    assert (newest.path.name, rejected) == (NEWEST, [])


@pytest.mark.parametrize("call", ["scandir", "stat", "readlink", "open"])
def test_fake_outage_of_every_call_ends_in_one_error_and_changes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Listing, links, sizes and contents: an outage of any of them is not an empty folder."""
    before = snapshot(run / "checkpoints")
    with monkeypatch.context() as patch:
        FakeOutage(patch, call, errno.ETIMEDOUT, "checkpoints", times=-1)
        for name in ("newest", "best", "begin at zero"):
            with pytest.raises(UnreadableNow):
                READS[name](run)
    assert snapshot(run / "checkpoints") == before


@pytest.mark.parametrize("call", ["scandir", "stat", "readlink", "open"])
def test_fake_outage_that_ends_in_time_is_waited_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """A read is retried, with one log line, and finds the newest checkpoint."""
    monkeypatch.setenv(PATIENCE, "60")
    outage = FakeOutage(monkeypatch, call, errno.ETIMEDOUT, "checkpoints", times=2)
    chosen = open_manager(run).choose(run)
    assert outage.left == 0
    assert chosen is not None
    assert chosen.path.name == NEWEST
    assert len(caplog.messages) == 1
    assert os.strerror(errno.ETIMEDOUT) in caplog.messages[0]


@pytest.mark.parametrize("match", ["run", "run/checkpoints"])
def test_fake_unreadable_folder_is_not_an_empty_folder(run: Path, monkeypatch: pytest.MonkeyPatch, match: str) -> None:
    """A failed listing does not decide whether a run is resumed."""
    assert has_checkpoint(run)
    for name in ("listdir", "scandir"):
        FakeOutage(monkeypatch, name, errno.EACCES, match, times=-1)
    with pytest.raises(UnreadableNow):
        has_checkpoint(run)


def test_a_damaged_checkpoint_behind_an_unreadable_one_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set aside before it is known which checkpoint is used."""
    os.truncate(run / "checkpoints" / NEWEST / "model.safetensors", 10)
    before = snapshot(run / "checkpoints")
    with monkeypatch.context() as patch:
        FakeOutage(patch, "open", errno.EIO, f"{BEFORE}/state.json", times=-1)
        with pytest.raises(UnreadableNow):
            open_manager(run).choose(run)
    assert snapshot(run / "checkpoints") == before


@pytest.mark.parametrize("prefix", ["", "superseded-"])
def test_an_unreadable_checkpoint_is_not_dropped(run: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """If the state of a checkpoint cannot be read, it is unknown whether it must be kept."""
    folder = run / "checkpoints"
    hidden = (folder / "step-00000012").rename(folder / f"{prefix}step-00000012")
    with monkeypatch.context() as patch:
        FakeOutage(patch, "open", errno.ETIMEDOUT, f"{hidden.name}/state.json", times=-1)
        prune(folder, Retention(keep_last=1))
    assert hidden.is_dir()
    assert not (folder / BEFORE).exists()
    prune(folder, Retention(keep_last=1))
    assert not hidden.exists()


# --- The command, with an outage in all of its processes --------------------------------------------------------------


def outage(switch: Path, match: str, patience_s: float, number: int = errno.ETIMEDOUT) -> dict[str, str]:
    settings = json.dumps({"switch": str(switch), "errno": number, "match": match})
    return {"PYTHONPATH": str(OUTAGE), "OUTAGE": settings, PATIENCE: str(patience_s)}


FILES_OF_STEPS = r".*/checkpoints/step-[0-9]+/.*"
CHECKPOINTS = r".*/run/checkpoints"
RUN_FOLDER = r".*/run"


@pytest.mark.parametrize(
    "match",
    [
        pytest.param(FILES_OF_STEPS, id="files"),
        pytest.param(CHECKPOINTS, id="listing", marks=pytest.mark.faults),
        pytest.param(RUN_FOLDER, id="run folder", marks=pytest.mark.faults),
    ],
)
def test_a_lasting_outage_ends_with_exit_code_4_and_loses_nothing(run: Path, match: str) -> None:
    """The command reports that the checkpoints cannot be read, and does not change them."""
    (run / "results.json").unlink()
    switch = run.parent / "switch"
    switch.touch()
    before = {name: found for name, found in snapshot(run).items() if "/step-" in name}
    flags = [*QUICK, *FLAGS, "--processes=2", "--output-dir=run", "--resume=auto"]
    answer = paceline("train", "shapes-cnn", *flags, cwd=run.parent, env=outage(switch, match, 0.3, errno.EACCES))
    assert answer.code == EXIT_CHECKPOINT, answer
    assert answer.err.count("error: ") == 1
    assert os.strerror(errno.EACCES) in answer.err
    assert {name: found for name, found in snapshot(run).items() if "/step-" in name} == before
    switch.unlink()
    answer = paceline("train", "shapes-cnn", *flags, cwd=run.parent)
    assert (answer.code, read_results(run)["steps"]) == (0, 18), answer
    assert "resumed   at step 18" in answer.out


def finish_after_outage(arguments: list[str], folder: Path, switch: Path, match: str) -> str:
    """Run a command, end the outage when the command reports that it waits, and return the output."""
    switch.touch()
    said = []
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", *arguments],
        cwd=folder,
        env=environment(**outage(switch, match, 60)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if "trying again for up to" in line:
                switch.unlink(missing_ok=True)
    assert process.returncode == 0, said
    assert not switch.exists()  # it did wait
    return "".join(said)


@pytest.mark.faults
@pytest.mark.parametrize("match", [FILES_OF_STEPS, CHECKPOINTS], ids=["files", "listing"])
def test_an_outage_that_ends_delays_the_resume(run: Path, finished_run: Path, match: str) -> None:
    """The run resumes from its newest checkpoint when the storage is back."""
    shutil.rmtree(run / "checkpoints" / NEWEST)
    flags = [*QUICK, *FLAGS, "--processes=1", "--omp-num-threads=1", "--output-dir=run", "--resume=auto"]
    said = finish_after_outage(["train", "shapes-cnn", *flags], run.parent, run.parent / "switch", match)
    assert "resumed   at step 16" in said
    assert read_results(run)["weights_sha256"] == read_results(finished_run)["weights_sha256"]
    assert [path.name for path in step_folders(run / "checkpoints")][:2] == [NEWEST, BEFORE]
    assert not list((run / "checkpoints").glob("damaged-*"))


@pytest.mark.faults
def test_an_outage_while_a_killed_rank_is_restarted(tmp_path: Path) -> None:
    """The supervisor's next attempt waits for the storage too. The result equals that of the undisturbed run."""
    (tmp_path / "calm").mkdir()
    expected = run_undisturbed(tmp_path / "calm")
    flags = [*TRAIN, "--inject=kill rank=1 step=22"]
    said = finish_after_outage(flags, tmp_path, tmp_path / "switch", FILES_OF_STEPS)
    assert "resumed   at step 20" in said
    assert len(injected_faults(tmp_path / "run")) == 1
    assert outcome(tmp_path / "run") == expected
    assert expected["steps"] == STEPS


@pytest.mark.faults
def test_an_outage_under_torchrun_starts_no_run_at_step_0(run: Path) -> None:
    """Without a supervisor the ranks decide. All end with exit code 4, and nothing changes."""
    switch = run.parent / "switch"
    switch.touch()
    before = {name: found for name, found in snapshot(run).items() if "/step-" in name}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "paceline")
    flags = [*QUICK, *FLAGS, "--output-dir=run", "--resume=auto"]
    answer = command(
        *(sys.executable, *launch, "train", "shapes-cnn", *flags), cwd=run.parent, env=outage(switch, CHECKPOINTS, 0.3)
    )
    assert answer.code != 0
    assert "checkpoints cannot be read now" in answer.err
    codes = set(re.findall(r"exitcode\s*: (-?\d+)", answer.err))
    assert "4" in codes, answer.err
    assert codes <= {"4", "-15"}, answer.err  # torchrun ends the slower rank
    assert {name: found for name, found in snapshot(run).items() if "/step-" in name} == before


@pytest.mark.faults
def test_all_damaged_ends_with_exit_code_4_and_restarts_on_request(run: Path) -> None:
    """--resume auto does not start at step 0 by itself, neither at the first attempt nor at the next."""
    (run / "results.json").unlink()
    folder = run / "checkpoints"
    for path in step_folders(folder):
        (path / "manifest.json").unlink()
    flags = [*QUICK, *FLAGS, "--processes=1", "--output-dir=run", "--resume=auto"]
    said = paceline("evaluate", "run", cwd=run.parent)
    assert (said.code, "4 damaged" in said.err) == (EXIT_CHECKPOINT, True), said
    for _ in range(2):
        answer = paceline("train", "shapes-cnn", *flags, cwd=run.parent)
        assert [answer.out.count(f"{path.name} is damaged") for path in step_folders(folder)] == [1] * 4, answer
        shown = json.loads(paceline("status", "run", "--json", cwd=run.parent).out)
        assert shown["saved_step"] == 0
        assert "--resume" not in str(shown["failure"])
        assert answer.code == EXIT_CHECKPOINT, answer
        assert "--start-over-if-damaged" in answer.err
        assert len(step_folders(folder)) == 4
    for path in step_folders(folder):  # set aside by hand, or by an earlier version
        path.rename(folder / f"damaged-{path.name}")
    answer = paceline("train", "shapes-cnn", *flags, cwd=run.parent)
    assert answer.code == EXIT_CHECKPOINT, answer
    answer = paceline("train", "shapes-cnn", *flags, "--start-over-if-damaged", cwd=run.parent)
    assert (answer.code, read_results(run)["steps"]) == (0, 18), answer
    assert len(list(folder.glob("damaged-*"))) == 4
