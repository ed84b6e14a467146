"""Two starts of a run with one store, a store that is behind, and a fetch that is interrupted at any point."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checkpoints.test_mirror import (
    URL,
    accept_every_note,
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
from paceline.runs.owner import new_owner
from paceline.runs.stores import MirrorNote, Store, StoreError, local_path, open_store, read_note

__all__ = ["in_an_empty_store"]  # a fixture for every test here


def uploader_of(folder: RunFolder) -> CheckpointUploader:
    return CheckpointUploader(folder, StoreMirror(folder, read_note(folder.path) or MirrorNote("")))


def claim_elsewhere() -> None:
    """Claim the store like a start on another machine."""
    note = MirrorNote(URL, token="another start", keep_last=2)
    open_store(URL, "here").write(mirror.MIRROR_NOTE, json.dumps(note.__dict__).encode())


@pytest.mark.parametrize(
    "moment",
    ["metrics.jsonl", "model.safetensors", "step-00000003/state.json", "step-00000003/manifest.json", "latest", "best"],
)
def test_a_mirror_that_lost_the_store_changes_nothing_more(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The other start claims the store right before one of the changes. That change and later ones are not made."""
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
    """The other start claims the store right before the first removal."""
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


def test_fake_race_uploads_of_another_start_are_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the token is read too early, a mirror drops only unchanged files that it has seen or uploaded."""
    accept_every_note(monkeypatch)
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
    save(folder, 3)  # for this mirror, the run was rewound: 4 and 5 are later checkpoints
    mine.upload_new()
    assert set(steps_stored()) >= {4, 5} & set(before)


def test_a_store_that_is_always_behind_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """During every upload, a newer checkpoint appears and the uploading one is dropped here."""
    folder = new_run()
    save(folder, 1)
    largest = 0

    def train_further(name: str) -> None:
        nonlocal largest
        parts = name.split("/")
        largest = max(largest, len(steps_stored()))
        if parts[-1] == "model.safetensors" and (step := int(parts[1].removeprefix("step-"))) < 9:
            save(folder, step + 1)
            shutil.rmtree(folder.checkpoints / f"step-{step:08}")

    watch(monkeypatch, train_further)
    assert push(folder, nothing)
    assert largest <= 3  # two are kept, and the next one is uploaded
    assert steps_stored() == [8, 9]


def test_a_start_drops_old_checkpoints_that_an_earlier_start_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start was killed after an upload and before it dropped older checkpoints. The next start drops them."""
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


def test_files_that_another_start_has_replaced_are_uploaded_again() -> None:
    """An upload of another start may end after ours. At the end, all files are compared once more."""
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


def test_a_fetch_interrupted_at_any_point_is_completed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint gets its name last. Until then everything is fetched again."""
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


def test_a_fetch_into_a_run_of_another_owner_is_refused() -> None:
    """Two starts must not write into one working copy."""
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    here = RunFolder(Path("here"))
    here.create()
    with RunFolder(here.path).owned(), pytest.raises(UserError, match="another process"):
        fetch_run(open_store(URL, "here"), here, "", nothing)
    assert not list(here.checkpoints.iterdir())


def test_a_source_that_trains_here_is_only_read(tmp_path: Path) -> None:
    """Older metrics and status of the store do not replace its own."""
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
    """The lock file and its contents belong to this machine."""
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    open_store(URL, "here").write("run.lock", b"{}")
    here = RunFolder(Path("here"))
    fetch_run(open_store(URL, "here"), here, "", nothing)
    assert here.lock.read_bytes() == b""
