"""Faults 7, 8 and 9: damaged and forged checkpoints are detected, and the run resumes from the one before."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from faults.damage import ACCIDENTS, FORGERIES, Canary, flip_a_bit, forge, newer_schema
from faults.finished_run import BEFORE, DAMAGED, FLAGS, NEWEST
from harness.cli import environment
from harness.ranks import make_world, run_ranks
from harness.runs import QUICK, read_results, train_in
from paceline.checkpoints import store
from paceline.checkpoints.format import DamagedCheckpoint, NewerSchema, checksum_of, read_manifest, step_folders, verify
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.payload import PayloadReader
from paceline.checkpoints.resume import adopt_best
from paceline.checkpoints.store import find_newest, list_damaged, open_checkpoint, point
from paceline.cli.command import run_verb
from paceline.errors import CheckpointError
from paceline.metrics.recorder import read_rows

MOST_CPU_S = 1.0
MOST_DETECTION_S = 0.1
MOST_MEMORY = 2**30  # address space, including Python's own


@pytest.fixture(autouse=True)
def quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RETRY_PAUSE_S", 0.0)


def open_manager(run: Path) -> CheckpointManager:
    """A manager that owns the checkpoints of a run."""
    world = make_world(0, 1)
    return CheckpointManager(
        run / "checkpoints", world, is_sharded=False, retention=store.Retention(keep_last=4), is_async=False
    )


# Faults 7 (cut, deleted, zeroed) and 8 (50 single bits).


@pytest.mark.parametrize("case", ACCIDENTS)
def test_damage_is_detected_and_the_checkpoint_before_is_used(
    case: str, run: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    name, damage = ACCIDENTS[case]
    newest = run / "checkpoints" / NEWEST
    original = (newest / name).read_bytes()
    damage(newest)
    assert not (newest / name).exists() or (newest / name).read_bytes() != original  # the damage changed the file

    assert run_verb("checkpoints", [str(run), "--verify"]) == DAMAGED
    out = capsys.readouterr().out
    assert f"{NEWEST}/{name}" in out
    assert "expected" in out
    assert "got" in out

    chosen = open_manager(run).choose(run)
    assert chosen is not None
    assert (chosen.path.name, chosen.step) == (BEFORE, 16)
    (record,) = caplog.records
    assert record.message.startswith(f"warning: checkpoint {NEWEST} is damaged ({name}: expected ")
    assert ", got " in record.message
    assert record.message.endswith(f"moved to damaged-{NEWEST}")
    assert not newest.exists()
    assert (run / "checkpoints" / f"damaged-{NEWEST}").is_dir()

    assert run_verb("checkpoints", [str(run), "--verify"]) == 0  # set-aside checkpoints do not count
    assert f"set aside: damaged-{NEWEST}" in capsys.readouterr().out


def test_any_changed_bit_of_a_manifest_is_detected(run: Path) -> None:
    # Most changed bits also break the JSON. Those in a version or a hash are detected only by the seal.
    path = run / "checkpoints" / NEWEST / "manifest.json"
    original = path.read_bytes()
    with path.open("r+b") as file:
        for position, byte in enumerate(original):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: expected .*, got "):
                    read_manifest(path.parent)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert path.read_bytes() == original
    read_manifest(path.parent)


RESUMED: dict[str, Any] = {
    "truncated to half": (),
    "bit 3 flipped in manifest.json": (),
    "deleted": pytest.mark.faults,
    "bit 1 flipped in optimizer.safetensors": pytest.mark.faults,
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks) for case, marks in RESUMED.items()])
def test_a_run_resumed_from_the_checkpoint_before_has_the_same_result(case: str, run: Path, finished_run: Path) -> None:
    (run / "results.json").unlink()
    ACCIDENTS[case][1](run / "checkpoints" / NEWEST)
    assert run_verb("checkpoints", [str(run), "--verify"]) == DAMAGED
    run_ranks(1, train_in, str(run), FLAGS, True)
    assert (run / "checkpoints" / f"damaged-{NEWEST}").is_dir()
    times = {name: row_times(path) for name, path in (("before", finished_run), ("after", run))}
    again = [step for step, at in times["after"].items() if at != times["before"][step]]
    assert again == [17, 18]  # lost: less than one interval
    assert read_results(run)["weights_sha256"] == read_results(finished_run)["weights_sha256"]
    assert read_results(run)["test_loss"] == read_results(finished_run)["test_loss"]
    assert metrics_without_time(run) == metrics_without_time(finished_run)
    assert open_checkpoint(run / "checkpoints" / "latest").step == 18


def row_times(folder: Path) -> dict[int, float]:
    """The time at which each step was recorded."""
    return {row["step"]: row["time"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"}


def metrics_without_time(folder: Path) -> list[str]:
    return [line.rpartition(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]


@pytest.mark.parametrize("case", ["truncated to half", "last 100 bytes cut", "deleted"])
def test_wrong_sizes_are_detected_without_reading_a_tensor(case: str, run: Path) -> None:
    ACCIDENTS[case][1](run / "checkpoints" / NEWEST)
    started = time.process_time()
    with pytest.raises(DamagedCheckpoint):
        verify(run / "checkpoints" / NEWEST)
    assert time.process_time() - started < MOST_DETECTION_S


@pytest.mark.faults
def test_verify_reads_a_gigabyte_per_second_on_one_core(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    path.write_bytes(bytes(range(256)) * 2**20)  # 256 MB
    seconds = []
    for _ in range(5):  # use the fastest: other programs may slow down single runs
        started = time.process_time()
        checksum_of(path)
        seconds.append(time.process_time() - started)
    assert path.stat().st_size / min(seconds) >= 10**9


def test_if_all_checkpoints_are_damaged_the_run_restarts_only_on_request(run: Path) -> None:
    """Exit code 4 and no change on the disk, unless the user asks for a start at step 0."""
    folder = run / "checkpoints"
    for path in step_folders(folder):
        (path / "manifest.json").unlink()
    before = everything_below(run)
    newest, rejected = find_newest(folder)
    assert (newest, len(rejected)) == (None, 4)
    manager = open_manager(run)
    assert manager.choose(run) is None
    for source in (run, None):
        with pytest.raises(CheckpointError, match="does not start at step 0"):
            manager.begin_at_zero(source, may_drop_damaged=False)
    assert everything_below(run) == before
    manager.begin_at_zero(run, may_drop_damaged=True)
    assert step_folders(folder) == []
    assert len(list_damaged(folder)) == 4
    with pytest.raises(CheckpointError, match="does not start at step 0"):  # set aside, not deleted
        manager.begin_at_zero(run, may_drop_damaged=False)


@pytest.mark.parametrize("may_drop_damaged", [False, True])
def test_a_run_with_a_complete_checkpoint_never_starts_at_step_0(run: Path, may_drop_damaged: bool) -> None:
    """Complete checkpoints are resumed or left alone. No flag deletes them."""
    before = everything_below(run)
    for source in (run, None):
        with pytest.raises(CheckpointError, match="holds checkpoints"):
            open_manager(run).begin_at_zero(source, may_drop_damaged=may_drop_damaged)
    assert everything_below(run) == before


def test_a_damaged_best_checkpoint_is_replaced_by_the_newest(run: Path) -> None:
    folder = run / "checkpoints"
    point(folder, "best", folder / NEWEST)
    flip_a_bit("model.safetensors", 0.5, 0, folder / NEWEST)
    newest, reports = find_newest(folder, prefer_best=True)
    assert newest is not None
    assert newest.path.name == BEFORE
    assert len(reports) == 1


def test_resume_restores_the_best_link(run: Path) -> None:
    # The process was killed between the commit of a checkpoint and the update of the link, or the run was rewound.
    folder = run / "checkpoints"
    for stale in (BEFORE, NEWEST):
        point(folder, "best", folder / stale)
        adopt_best(folder, folder, 9)
        assert (folder / "best").resolve().name == "step-00000009"
    adopt_best(folder, folder, 0)
    assert not (folder / "best").is_symlink()


# --- Fault 9: forgeries -----------------------------------------------------------------------------------------------

# One process with little memory runs all forgeries. Each is the complete command, including its exit code.
REFUSE = """
import contextlib, io, json, resource, sys, time
from paceline.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, 2 * (int(sys.argv[1]),))
answers = {}
for name, arguments in json.loads(sys.stdin.read()).items():
    err, started = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(err):
        code = main(arguments)
    answers[name] = [code, err.getvalue(), time.process_time() - started, "torch" in sys.modules]
print(json.dumps(answers))
"""


def everything_below(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {str(path.relative_to(folder)): (state.st_mode, state.st_size) for path, state in found.items()}


def test_forged_checkpoints_are_refused_at_once_and_nothing_is_executed(finished_run: Path, tmp_path: Path) -> None:
    requests = {}
    for number, (name, (spoil, _)) in enumerate(FORGERIES.items()):
        folder = tmp_path / str(number) / "forged"
        shutil.copytree(finished_run / "checkpoints" / NEWEST, folder)
        spoil(folder)
        flags = ["--processes=1", f"--resume={folder}", f"--output-dir={folder.parent}/out"]
        requests[name] = ["train", "shapes-cnn", *QUICK, *FLAGS, *flags]
    before = everything_below(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, str(MOST_MEMORY)],
        input=json.dumps(requests),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert answers.keys() == FORGERIES.keys()
    for name, (code, screen, cpu_s, has_torch) in answers.items():
        assert code == DAMAGED, (name, screen)
        assert FORGERIES[name][1] in screen
        assert screen.startswith("error: the checkpoint ")
        assert "Traceback" not in screen
        assert cpu_s < MOST_CPU_S, name
        assert not has_torch
    assert not list(tmp_path.rglob("canary"))
    assert everything_below(tmp_path) == before  # no file written, inside or outside of the run


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_newest_checkpoint_is_skipped(case: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    FORGERIES[case][0](folder / NEWEST)
    assert run_verb("checkpoints", [str(run)]) == DAMAGED
    assert run_verb("checkpoints", [str(run), "--json"]) == DAMAGED
    capsys.readouterr()
    if case == "newer schema":  # complete, and useful for a newer version: it is not set aside
        with pytest.raises(CheckpointError, match="newer Paceline"):
            find_newest(folder)
        assert (folder / NEWEST).is_dir()
    else:
        newest, reports = find_newest(folder)
        assert newest is not None
        assert (newest.path.name, len(reports)) == (BEFORE, 1)
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    "places",
    [
        '{"w": {"offset": [0], "whole_shape": [1000000000000]}}',
        '{"w": {"offset": [-4], "whole_shape": [4]}}',
        '{"w": {"offset": [0, 0], "whole_shape": [4]}}',
        '{"w": 7}',
        "not JSON",
        "[" * 100_000,
    ],
)
def test_slices_with_wrong_offsets_are_refused(places: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors", {"paceline_slices": places})
    with pytest.raises(CheckpointError):
        PayloadReader(tmp_path, ["model.safetensors"]).read("w")


def test_the_canary_works(tmp_path: Path) -> None:
    # Otherwise the tests above could not detect that a pickle was executed.
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def test_a_forged_seal_without_changes_is_accepted(run: Path) -> None:
    # Otherwise the forgeries above might be refused only because of their seal.
    newest = run / "checkpoints" / NEWEST
    original = (newest / "manifest.json").read_bytes()
    forge(newest)
    assert (newest / "manifest.json").read_bytes() == original
    forge(newest, lambda body: body["about"].update(strategy="forged"))
    assert verify(newest).about["strategy"] == "forged"
    newer_schema(newest)
    with pytest.raises(NewerSchema):
        read_manifest(newest)


def test_pickles_in_a_checkpoint_folder_are_never_opened(run: Path) -> None:
    newest = run / "checkpoints" / NEWEST
    for name in (".metadata", "optimizer.pt", "model.pkl"):
        (newest / name).write_bytes(pickle.dumps(Canary(run.parent / "canary")))
    run_ranks(1, train_in, str(run), FLAGS, True)
    assert read_results(run)["steps"] == 18
    assert not (run.parent / "canary").exists()


def test_a_best_link_that_leads_outside_is_not_followed(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints"
    outside = tmp_path / "step-00000099"
    outside.mkdir()
    (folder / "best").unlink()
    (folder / "best").symlink_to("../../step-00000099")
    newest, reports = find_newest(folder, prefer_best=True)
    assert newest is not None
    assert (newest.path.name, reports) == (NEWEST, [])
    assert outside.is_dir()  # not renamed as damaged
