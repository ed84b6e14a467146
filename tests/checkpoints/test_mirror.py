"""The mirror of a run folder, with stores in memory and on disk: order of uploads, pruning, and ownership."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints import fetch, mirror, remote, uploader
from paceline.checkpoints import store as disk
from paceline.checkpoints.fetch import fetch_run, prepare_store, push
from paceline.checkpoints.format import FileSeal, Manifest, add_checksum, parse_manifest
from paceline.checkpoints.mirror import mirrored
from paceline.errors import CheckpointError, UserError
from paceline.runs.folder import RunFolder
from paceline.runs.stores import MirrorNote, Store, StoreError, local_path, open_store, read_note, split_checkpoint
from paceline.settings.load import load_config

URL = "memory://run"


@pytest.fixture(autouse=True)
def in_an_empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(uploader.PATIENCE, "5")
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def save(folder: RunFolder, step: int, *, accuracy: float = 0.5, keep: bool = False, is_best: bool = False) -> Path:
    """A small real checkpoint, committed like the manager does."""
    temporary = disk.temporary_folder(folder.checkpoints, step)
    temporary.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    payload = len(header).to_bytes(8, "little") + header + step.to_bytes(4, "little")
    (temporary / "model.safetensors").write_bytes(payload)
    state = {"step": step, "keep": keep, "validation": {"accuracy": accuracy, "loss": 1.0}}
    seals = {"model.safetensors": FileSeal(len(payload), add_checksum(payload))}
    final = disk.commit(temporary, seals, json.dumps(state).encode(), {"step": step})
    disk.supersede_after(folder.checkpoints, step)
    for name in ("latest", "best") if is_best else ("latest",):
        disk.point(folder.checkpoints, name, final)
    return final


def new_run(machine: str = ".") -> RunFolder:
    """The working copy of the URL. `machine` gives it another path, as on another machine."""
    folder = RunFolder(Path(machine) / local_path(URL))
    folder.create()
    folder.config.write_text("epochs: 3\n")
    folder.metrics_jsonl.write_text('{"step": 1}\n')
    MirrorNote(URL, keep_last=2, keep_best=1).write(folder.path)
    return folder


def accept_every_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of several machines are side by side here. On its own machine each is the working copy."""
    for module in (fetch, mirror):
        monkeypatch.setattr(module, "read_own_note", read_note)


def stored() -> dict[str, bytes]:
    store = open_store(URL, "here")
    return {name: store.read(name) or b"" for name in store.list()}


def steps_stored() -> list[int]:
    names = [name.split("/") for name in stored()]
    sealed = {parts[1] for parts in names if len(parts) == 3 and parts[2] == "manifest.json"}
    return sorted(int(name.removeprefix("step-")) for name in sealed if name.startswith("step-"))


def watch(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> list[str]:
    """Every uploaded file, in order. `before` is called with its name first and may fail."""
    sent: list[str] = []
    put, write = Store.put, Store.write

    def watched_put(self: Store, source: Path, name: str) -> None:
        before(name)
        put(self, source, name)
        sent.append(name)

    def watched_write(self: Store, name: str, content: bytes) -> None:
        before(name)
        write(self, name, content)
        sent.append(name)

    monkeypatch.setattr(Store, "put", watched_put)
    monkeypatch.setattr(Store, "write", watched_write)
    return sent


def nothing(name: str) -> None:
    pass


def test_a_url_has_one_working_copy() -> None:
    assert local_path("s3://bucket/a/b/") == Path("runs/s3/bucket/a/b")
    assert local_path("some/where") == Path("some/where")
    for wrong in ("s3://bucket", "s3://", "s3://bucket/../x", "a::s3://bucket/x", "/x://y/z"):
        with pytest.raises(UserError, match="names no run"):
            local_path(wrong)
    assert split_checkpoint("s3://b/run/") == ("s3://b/run", "")
    assert split_checkpoint("s3://b/run/checkpoints/best") == ("s3://b/run", "best")
    assert split_checkpoint("s3://b/checkpoints/run/checkpoints/step-00000700/") == (
        "s3://b/checkpoints/run",
        "step-00000700",
    )
    assert split_checkpoint("s3://b/checkpoints/run") == ("s3://b/checkpoints/run", "")


def test_payload_is_uploaded_before_the_manifest_and_the_pointers_last(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run()
    save(folder, 7, is_best=True)
    sent = watch(monkeypatch, nothing)
    assert push(folder, nothing)
    names = [name.removeprefix("checkpoints/step-00000007/") for name in sent[:7]]
    assert names == [
        *("mirror.json", "metrics.jsonl", "model.safetensors", "state.json", "manifest.json"),
        *("checkpoints/latest", "checkpoints/best"),
    ]
    assert stored()["config.yaml"] == b"epochs: 3\n"
    assert read_note(folder.path) == replace(
        read_note(folder.path) or MirrorNote(""), says="up to date, checkpoints up to step 7"
    )


def test_the_newest_is_uploaded_first_then_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run()
    for step in (1, 2, 3, 4):
        save(folder, step, is_best=step == 2)
    sent = watch(monkeypatch, nothing)
    assert push(folder, nothing)
    assert [name.split("/")[1] for name in sent if name.endswith("manifest.json")] == [
        *("step-00000004", "step-00000002", "step-00000003", "step-00000001")
    ]


def test_the_store_prunes_checkpoints_that_this_disk_never_had() -> None:
    folder = new_run()
    for step in (1, 2, 3, 4):
        save(folder, step, keep=step == 1, accuracy=0.9 if step == 2 else 0.1, is_best=step == 2)
    assert push(folder, nothing)
    shutil.rmtree(folder.checkpoints / "step-00000001")  # like a machine that fetched only the newest and the best
    shutil.rmtree(folder.checkpoints / "step-00000003")
    save(folder, 5)
    assert push(folder, nothing)
    assert steps_stored() == [1, 2, 4, 5]  # kept permanently, best, the last two


def test_nothing_is_dropped_before_its_successor_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    for step in (2, 3, 4):
        save(folder, step)
    for step in (1, 2):
        shutil.rmtree(folder.checkpoints / f"step-{step:08}")

    def fail(name: str) -> None:
        if name.endswith("/manifest.json"):
            raise StoreError("full")

    monkeypatch.setenv(uploader.PATIENCE, "0.2")
    with monkeypatch.context() as failing:
        watch(failing, fail)
        assert not push(folder, nothing)
    assert "IS BEHIND: 2 checkpoints did not arrive" in capsys.readouterr().err
    assert steps_stored() == [1]
    assert push(folder, nothing)
    assert steps_stored() == [3, 4]


def test_a_checkpoint_lost_in_the_store_is_uploaded_again_before_others_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = new_run()
    for step in (1, 2):
        save(folder, step)
    assert push(folder, nothing)
    shutil.rmtree(folder.checkpoints / "step-00000001")
    save(folder, 3)
    seen: list[list[int]] = []

    def lose(name: str) -> None:
        if name == "checkpoints/latest" and len(seen) == 1:
            open_store(URL, "here").remove("checkpoints/step-00000003/model.safetensors")
        if name == "checkpoints/step-00000003/model.safetensors":
            seen.append(steps_stored())

    sent = watch(monkeypatch, lose)
    assert push(folder, nothing)
    assert sent.count("checkpoints/step-00000003/model.safetensors") == 2
    assert seen == [[1, 2], [1, 2]]  # the second time, nothing was dropped either
    assert steps_stored() == [2, 3]


def test_a_disk_without_hard_links_keeps_its_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run()
    save(folder, 1)

    def refuse(*names: Path) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(uploader.os, "link", refuse)
    assert push(folder, nothing)
    assert steps_stored() == [1]
    assert disk.open_checkpoint(folder.checkpoints / "latest").step == 1


def test_a_partial_upload_of_another_branch_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run()
    for step in (1, 2):
        save(folder, step)
    assert push(folder, nothing)
    disk.supersede_after(folder.checkpoints, 1)
    save(folder, 2, accuracy=0.7)

    def fail(name: str) -> None:
        if name.endswith("step-00000002/state.json"):
            raise StoreError("full")

    monkeypatch.setenv(uploader.PATIENCE, "0.2")
    watch(monkeypatch, fail)
    assert not push(folder, nothing)
    assert steps_stored() == [1]


def test_a_rewound_run_does_not_keep_later_checkpoints() -> None:
    folder = new_run()
    for step in (1, 2, 3):
        save(folder, step, keep=step == 2)
    assert push(folder, nothing)
    disk.supersede_after(folder.checkpoints, 1)
    save(folder, 2, accuracy=0.7)
    assert push(folder, nothing)
    assert steps_stored() == [1, 2]
    assert json.loads(stored()["checkpoints/step-00000002/state.json"])["validation"]["accuracy"] == 0.7
    assert stored()["checkpoints/latest"] == b"step-00000002\n"


def test_a_kept_checkpoint_of_an_abandoned_branch_gets_another_name() -> None:
    folder = new_run()
    for step in (1, 5):
        save(folder, step, keep=step == 5)
    assert push(folder, nothing)
    save(folder, 3)
    assert push(folder, nothing)
    assert steps_stored() == [1, 3]
    assert "checkpoints/superseded-step-00000005/manifest.json" in stored()


def test_a_checkpoint_dropped_here_during_its_upload_is_uploaded_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run()
    path = save(folder, 1)

    def drop(name: str) -> None:
        if name.endswith("step-00000001/model.safetensors") and path.exists():
            save(folder, 2)
            shutil.rmtree(path)

    sent = watch(monkeypatch, drop)
    assert push(folder, nothing)
    assert "checkpoints/step-00000001/manifest.json" in sent
    assert steps_stored()[-1] == 2
    assert not (folder.path / ".mirror").exists()


def test_changed_bytes_in_the_store_are_detected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_run()
    save(folder, 1)
    put = Store.put
    changed: list[Any] = []

    def change(self: Store, source: Path, name: str) -> None:
        put(self, source, name)
        if name.endswith("model.safetensors") and not changed:
            content = (self.read(name) or b"")[:-1] + b"\xff"
            self.write(name, content)
            changed.append(name)

    monkeypatch.setattr(Store, "put", change)
    assert push(folder, nothing)
    assert changed
    local = (folder.checkpoints / "step-00000001" / "model.safetensors").read_bytes()
    assert stored()["checkpoints/step-00000001/model.safetensors"] == local


def test_the_md5_of_a_multipart_upload_is_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "_PART_BYTES", 4)
    (tmp_path / "file").write_bytes(b"0123456789")
    parts = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in (b"0123", b"4567", b"89"))
    mark = remote._fingerprint(tmp_path / "file")
    assert mark.parts_md5 == hashlib.md5(parts, usedforsecurity=False).hexdigest() + "-3"
    assert mark.seal == FileSeal(10, add_checksum(b"0123456789"))


def test_a_checkpoint_that_is_damaged_here_is_not_uploaded(capsys: pytest.CaptureFixture[str]) -> None:
    folder = new_run()
    save(folder, 1)
    path = save(folder, 2) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert push(folder, nothing)
    assert steps_stored() == [1]
    assert "is damaged on this disk" in capsys.readouterr().err


def test_another_start_takes_over_and_the_first_stops_writing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_every_note(monkeypatch)
    folder = new_run("first")
    save(folder, 1)
    assert push(folder, nothing)
    other = new_run("second")
    fetch_run(open_store(URL, "here"), other, "", nothing)
    save(other, 2)
    with mirrored(folder):
        assert push(other, nothing)
        save(folder, 3)
    assert steps_stored() == [1, 2]
    assert "another start of this run writes to memory://run now" in capsys.readouterr().err
    shutil.rmtree(folder.checkpoints / "step-00000003")
    with pytest.raises(UserError, match="continued elsewhere"):
        push(folder, nothing)


def test_a_failing_store_is_reported_once_and_again_when_it_has_caught_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_run()
    MirrorNote(URL).write(folder.path)
    save(folder, 1)
    monkeypatch.setattr(uploader, "_POLL_EVERY_S", 0.01)
    said: list[str] = []
    failures = 3

    def fail(name: str) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            folder.write_status("running", step=1)
            said.append(str(folder.read_status().get("mirror")))
            raise StoreError("busy")

    watch(monkeypatch, fail)
    with mirrored(folder):
        while read_note(folder.path).says != "up to date, checkpoints up to step 1":  # type: ignore[union-attr]
            time.sleep(0.005)
    err = capsys.readouterr().err
    assert err.count("memory://run is behind: busy; training continues") == 1
    assert err.count("memory://run has caught up, checkpoints up to step 1") == 1
    assert said[0].startswith("behind 1 checkpoint since 20")
    assert said[-1].endswith(": busy")


def wait_until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        time.sleep(0.005)


@pytest.mark.parametrize("lost", ["everything", "small files", "pointers"])
def test_a_file_missing_in_the_store_is_uploaded_again_at_the_end(
    lost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The final message describes the files in the store at the end, not the files that were uploaded."""
    monkeypatch.setattr(uploader, "_POLL_EVERY_S", 0.01)
    folder = new_run()
    save(folder, 1, is_best=True)
    with mirrored(folder):
        wait_until(lambda: read_note(folder.path).says == "up to date, checkpoints up to step 1")  # type: ignore[union-attr]
        wait_until(lambda: "metrics.jsonl" in stored())
        before = stored()
        for name in before:
            is_pointer = name in ("checkpoints/latest", "checkpoints/best")
            if lost == "everything" or (is_pointer if lost == "pointers" else not name.startswith("checkpoints/")):
                open_store(URL, "here").remove(name)
        assert set(stored()) < set(before)
    assert set(stored()) >= set(before)
    assert stored()["checkpoints/latest"] == b"step-00000001\n"
    assert "the store has everything" in capsys.readouterr().out


def test_a_store_that_loses_the_last_upload_is_reported_as_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last check comes after the last file."""
    monkeypatch.setenv(uploader.PATIENCE, "0.5")
    folder = new_run()
    save(folder, 1)
    put = Store.put

    def forget_the_config(self: Store, source: Path, name: str) -> None:
        if name != "config.yaml":
            put(self, source, name)

    monkeypatch.setattr(Store, "put", forget_the_config)
    with mirrored(folder):
        pass
    printed = capsys.readouterr()
    assert "the store has everything" not in printed.out
    assert "config.yaml" in printed.err


def test_the_end_waits_while_a_large_upload_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    folder = new_run()
    save(folder, 1)
    put_file = MemoryFileSystem.put_file

    def crawl(self: MemoryFileSystem, source: str, target: str, callback: Any, **options: Any) -> None:
        for _ in range(6 if target.endswith("model.safetensors") else 0):
            time.sleep(0.1)  # not a synchronisation: this is the slow upload
            callback.relative_update(1)
        put_file(self, source, target, **options)

    monkeypatch.setenv(uploader.PATIENCE, "0.4")
    monkeypatch.setattr(MemoryFileSystem, "put_file", crawl)
    assert push(folder, nothing)


def test_the_end_does_not_wait_for_a_stalled_store_after_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_run()
    save(folder, 1)
    is_stalled, may_go_on = threading.Event(), threading.Event()

    def stall(name: str) -> None:
        is_stalled.set()
        assert may_go_on.wait(30)

    watch(monkeypatch, stall)
    monkeypatch.setenv(uploader.PATIENCE, "30")
    started_s = time.monotonic()
    with mirrored(folder, gives_up=is_stalled.is_set):
        assert is_stalled.wait(30)
    assert time.monotonic() - started_s < 5
    may_go_on.set()
    assert "IS BEHIND: 1 checkpoint did not arrive" in capsys.readouterr().err


def test_a_suspension_is_no_delay_of_the_store_with_a_fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is suspended during its last upload still completes it."""
    folder = new_run()
    save(folder, 1)
    suspended_s, looks = [0.0], [0]
    has_been_seen = threading.Event()
    read_clock = time.monotonic

    def suspend(name: str) -> None:
        suspended_s[0] = 1000.0
        assert has_been_seen.wait(30)

    def look() -> bool:
        looks[0] += suspended_s[0] > 0
        if looks[0] > 2:
            has_been_seen.set()
        return False

    watch(monkeypatch, suspend)
    monkeypatch.setattr(time, "monotonic", lambda: read_clock() + suspended_s[0])
    monkeypatch.setenv(uploader.PATIENCE, "30")
    with mirrored(folder, gives_up=look):
        pass
    assert steps_stored() == [1]


def test_a_fetched_run_equals_the_uploaded_run(tmp_path: Path) -> None:
    folder = new_run()
    for step in (1, 2, 3):
        save(folder, step, is_best=step == 1)
    assert push(folder, nothing)
    copy = RunFolder(tmp_path / "copy")
    fetch_run(open_store(URL, "here"), copy, "", nothing)
    assert [path.name for path in sorted(copy.checkpoints.glob("step-*"))] == ["step-00000001", "step-00000003"]
    for name in ("latest", "best"):
        assert (copy.checkpoints / name).readlink() == (folder.checkpoints / name).readlink()
        assert (
            disk.open_checkpoint(copy.checkpoints / name).state == disk.open_checkpoint(folder.checkpoints / name).state
        )
    assert copy.metrics_jsonl.read_text() == folder.metrics_jsonl.read_text()
    assert not (copy.path / "mirror.json").exists()


@pytest.mark.parametrize("damage", ["a bit", "cut", "no file", "manifest", "a path"])
def test_a_damaged_checkpoint_in_the_store_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    folder = new_run()
    for step in (1, 2):
        save(folder, step)
    assert push(folder, nothing)
    store, name = open_store(URL, "here"), "checkpoints/step-00000002/model.safetensors"
    content, seal = store.read(name) or b"", store.read("checkpoints/step-00000002/manifest.json") or b""
    if damage == "a bit":
        store.write(name, content[:-1] + b"\xff")
    elif damage == "cut":
        store.write(name, content[:-1])
    elif damage == "no file":
        store.remove(name)
    elif damage == "manifest":
        store.write("checkpoints/step-00000002/manifest.json", seal[:-9])
    else:
        listed = parse_manifest(seal)
        files = {**listed.files, "../../secret": FileSeal(1, 1)}
        store.write("checkpoints/step-00000002/manifest.json", Manifest(files, listed.about).to_bytes())
        store.write("checkpoints/step-00000002/../../secret", b"x")
    shown: list[str] = []
    copy = RunFolder(tmp_path / "copy")
    fetch_run(store, copy, "", shown.append)
    assert any("step-00000002 in memory://run is damaged" in line for line in shown)
    assert [path.name for path in copy.checkpoints.glob("*-0*")] == ["step-00000001"]
    with pytest.raises(CheckpointError, match="damaged"):
        fetch_run(store, RunFolder(tmp_path / "named"), "step-00000002", nothing)


def test_names_in_a_store_cannot_leave_the_working_copy(tmp_path: Path) -> None:
    folder = new_run()
    save(folder, 1)
    assert push(folder, nothing)
    from fsspec.implementations.memory import MemoryFileSystem

    for name in ("/run/../outside", "/run/logs/../../outside", "/run/.hidden"):
        MemoryFileSystem.store[name] = MemoryFileSystem.store["/run/config.yaml"]
    copy = RunFolder(tmp_path / "some" / "copy")
    fetch_run(open_store(URL, "here"), copy, "", nothing)
    assert not (tmp_path / "some" / "outside").exists()
    assert not (copy.path / ".hidden").exists()


def test_a_store_on_a_disk_behaves_the_same(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/run"
    folder = RunFolder(local_path(url))
    folder.create()
    MirrorNote(url).write(folder.path)
    save(folder, 1)
    assert push(folder, nothing)
    copy = RunFolder(tmp_path / "copy")
    fetch_run(open_store(url, "here"), copy, "latest", nothing)
    assert disk.open_checkpoint(copy.checkpoints / "latest").step == 1


def request(*flags: str) -> Callable[[], None]:
    return prepare_store(load_config("shapes-cnn", list(flags)), nothing)


def test_an_unreachable_store_refuses_only_starts_without_a_local_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--output-dir=memory://run", "--resume=auto")
    request(*flags)()
    folder = RunFolder(local_path(URL))
    token = (read_note(folder.path) or MirrorNote("")).token
    assert token in stored()["mirror.json"].decode()

    def fail(self: Store, below: str = "") -> None:
        raise StoreError("unplugged")

    monkeypatch.setattr(Store, "list", fail)
    with pytest.raises(UserError, match="does not answer"):
        request(*flags)
    save(folder, 1)
    request(*flags)()
    assert (read_note(folder.path) or MirrorNote("")).token == token  # a later claim by another start wins


def test_a_local_resume_of_a_working_copy_continues_to_mirror() -> None:
    request("--output-dir=memory://run")()
    folder = RunFolder(local_path(URL))
    save(folder, 1)
    before = read_note(folder.path)
    request(f"--resume={folder.path}")()
    after = read_note(folder.path)
    assert before is not None
    assert after is not None
    assert (after.url, after.token != before.token) == (URL, True)


def test_another_run_is_fetched_as_the_source_of_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_every_note(monkeypatch)
    folder = new_run("another-machine")
    save(folder, 1)
    assert push(folder, nothing)
    request("--resume=memory://run/checkpoints/latest", f"--output-dir={tmp_path / 'elsewhere'}")
    assert disk.open_checkpoint(local_path("memory://run/checkpoints/latest")).step == 1
    assert fetch.read_note(local_path(URL)) is None  # read only: its owner stays the same
