"""Two starts of a run and one store; a store that is behind; a fetch that is interrupted anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checkpoints.test_mirror import (
    URL,
    believe_every_note,
    in_an_empty_store,
    new_run,
    nothing,
    request,
    save,
    steps_stored,
    stored,
    watch,
)
from paceline.checkpoints import mirror
from paceline.checkpoints import store as disk
from paceline.checkpoints.fetch import fetch_run, push
from paceline.checkpoints.mirror import StoreMirror
from paceline.checkpoints.uploader import CheckpointUploader
from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runs.mirror_note import MirrorNote, read_note
from paceline.runs.owner import new_owner
from paceline.runs.stores import Store, StoreError, local_path, open_store

__all__ = ["in_an_empty_store"]  # a fixture for every test here


def uploader_of(folder: RunFolder) -> CheckpointUploader:
    return CheckpointUploader(folder, StoreMirror(folder, read_note(folder.path) or MirrorNote("")))


def claim_elsewhere() -> None:
    """As a start on another machine does it."""
    note = MirrorNote(URL, token="another start", keep_last=2)
    open_store(URL, "here").write(mirror.MIRROR_NOTE, json.dumps(note.__dict__).encode())


@pytest.mark.parametrize(
    "moment",
    ["metrics.jsonl", "model.safetensors", "step-00000003/state.json", "step-00000003/manifest.json", "latest", "best"],
)
def test_a_mirror_that_lost_the_store_changes_nothing_more(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The other start comes right before one of the changes: neither this one nor a later one is made."""
    folder = new_run()
    for step in (1, 2):
        save(folder, step)
    assert push(folder, nothing)
    folder.metrics_jsonl.write_text('{"step": 1}\n{"step": 3}\n')
    shutil.rmtree(folder.checkpoints / "step-00000001")
    save(folder, 3, is_best=True)  # step 1 would be dropped
    at_takeover: list[dict[str, bytes]] = []

    def take_over(name: str) -> None:
        if name.endswith(moment) and not at_takeover and "mirror.json" not in name:
            at_takeover.append({})
            claim_elsewhere()
            at_takeover[0].update(stored())

    sent = watch(monkeypatch, take_over)
    assert not push(folder, nothing)
    assert at_takeover
    assert stored() == at_takeover[0]
    assert not any(name.endswith(moment) and "mirror" not in name for name in sent[-1:])


def test_a_mirror_that_lost_the_store_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other start comes right before the first removal."""
    folder = new_run()
    for step in (1, 2, 3):
        save(folder, step)
    MirrorNote(URL, keep_last=3).write(folder.path)
    assert push(folder, nothing)
    MirrorNote(URL, keep_last=1).write(folder.path)
    for step in (1, 2):
        shutil.rmtree(folder.checkpoints / f"step-{step:08}")
    remove, removed = Store.remove, []

    def take_over(self: Store, name: str) -> None:
        removed.append(name)
        claim_elsewhere()
        remove(self, name)

    monkeypatch.setattr(Store, "remove", take_over)
    assert not push(folder, nothing)
    assert len(removed) == 1
    assert steps_stored() == [1, 2, 3]


def test_fake_race_what_another_start_has_sent_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the token is looked at too early: a mirror drops only what it has seen or sent, and unchanged."""
    believe_every_note(monkeypatch)
    folder = new_run()
    for step in (1, 2):
        save(folder, step)
    assert push(folder, nothing)
    mine = uploader_of(folder)
    monkeypatch.setattr(StoreMirror, "_require_own_token", lambda self, store: None)
    mine.upload_new()
    other = new_run("other")
    fetch_run(open_store(URL, "here"), other, "", nothing)
    save(other, 4)
    save(other, 5)
    assert push(other, nothing)
    before = steps_stored()
    save(folder, 3)  # the run went back, as far as this mirror can see: 4 and 5 are later ones
    mine.upload_new()
    assert set(steps_stored()) >= {4, 5} & set(before)


def test_a_store_that_is_always_behind_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer checkpoint comes, and the one that is being sent is dropped here, during every upload."""
    folder = new_run()
    save(folder, 1)
    largest = 0

    def train_on(name: str) -> None:
        nonlocal largest
        parts = name.split("/")
        largest = max(largest, len(steps_stored()))
        if parts[-1] == "model.safetensors" and (step := int(parts[1].removeprefix("step-"))) < 9:
            save(folder, step + 1)
            shutil.rmtree(folder.checkpoints / f"step-{step:08}")

    watch(monkeypatch, train_on)
    assert push(folder, nothing)
    assert largest <= 3  # two are kept, and the next one arrives
    assert steps_stored() == [8, 9]


def test_a_start_drops_what_an_earlier_one_did_not_get_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that was killed after a send and before it dropped older ones leaves them to the next start."""
    folder = new_run()
    for step in (1, 2, 3, 4):
        save(folder, step)
    with monkeypatch.context() as killed:
        killed.setattr(StoreMirror, "_prune", lambda self, remote: None)
        assert push(folder, nothing)
    for step in (1, 2):
        shutil.rmtree(folder.checkpoints / f"step-{step:08}")
    assert steps_stored() == [1, 2, 3, 4]
    assert push(folder, nothing)
    assert steps_stored() == [3, 4]


def test_what_another_start_has_replaced_is_sent_again() -> None:
    """An upload that was under way elsewhere may end after ours. Before the end, everything is compared once more."""
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    mine = uploader_of(folder)
    mine.upload_new()
    open_store(URL, "here").write("checkpoints/step-00000001/model.safetensors", b"of another upload")
    mine.upload_new(is_last=True)
    local = (folder.checkpoints / "step-00000001" / "model.safetensors").read_bytes()
    assert stored()["checkpoints/step-00000001/model.safetensors"] == local


# --- Fetching ---------------------------------------------------------------------------------------------------------


def test_a_fetch_interrupted_anywhere_is_completed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the newest checkpoint has no name here, everything is fetched again; once it has, all else is here."""
    folder = new_run()
    rows = '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    folder.metrics_jsonl.write_text(rows)
    save(folder, 1, is_best=True, accuracy=0.9)
    save(folder, 3)
    assert push(folder, nothing)
    get, files = Store.get, 0
    for last in range(100):
        here = RunFolder(Path(f"here-{last}"))
        files = 0

        def interrupt(self: Store, name: str, target: Path, last: int = last) -> None:
            nonlocal files
            files += 1
            if files > last:
                target.write_bytes(b"half of i")
                raise StoreError("unplugged")
            get(self, name, target)

        with monkeypatch.context() as unplugged:
            unplugged.setattr(Store, "get", interrupt)
            is_complete = True
            try:
                fetch_run(open_store(URL, "here"), here, "", nothing)
            except StoreError:
                is_complete = False
        if (here.checkpoints / "step-00000003").exists():
            assert here.metrics_jsonl.read_text() == rows
            assert (here.checkpoints / "step-00000001").exists()
        assert here.metrics_jsonl.exists() <= (here.metrics_jsonl.exists() and here.metrics_jsonl.read_text() == rows)
        fetch_run(open_store(URL, "here"), here, "", nothing)
        assert here.metrics_jsonl.read_text() == rows
        assert disk.open_checkpoint(here.checkpoints / "latest").step == 3
        assert disk.open_checkpoint(here.checkpoints / "best").step == 1
        assert not list(here.path.rglob(".*-draft"))
        if is_complete:
            break
    assert files >= 6


def test_a_run_that_another_process_owns_is_not_fetched_into() -> None:
    """Two starts must not write into one working copy."""
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    here = RunFolder(Path("here"))
    here.create()
    with RunFolder(here.path).owned(), pytest.raises(UserError, match="another process"):
        fetch_run(open_store(URL, "here"), here, "", nothing)
    assert not list(here.checkpoints.iterdir())


def test_a_source_that_is_in_training_here_is_only_read(tmp_path: Path) -> None:
    """Its metrics and status are not replaced by older ones of the store."""
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    source = RunFolder(local_path(URL))
    fetch_run(open_store(URL, "here"), source, "", nothing)
    source.metrics_jsonl.write_text('{"step": 1}\n{"step": 2}\n')
    owner = new_owner()
    source.lock.write_text(json.dumps({**owner.__dict__, "pid": 1, "process_start": None}))
    request("--resume=memory://run/checkpoints/latest", f"--output-dir={tmp_path / 'elsewhere'}")
    assert source.metrics_jsonl.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_store_cannot_replace_the_lock_file() -> None:
    """The lock file and what it says are this machine's."""
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    open_store(URL, "here").write("run.lock", b"{}")
    here = RunFolder(Path("here"))
    fetch_run(open_store(URL, "here"), here, "", nothing)
    assert here.lock.read_bytes() == b""
