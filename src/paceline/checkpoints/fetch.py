"""Fetches a run from its object store to this machine, and claims the store for this start."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.checkpoints import store as disk
from paceline.checkpoints.format import DamagedCheckpoint, NewerSchema, step_folders, step_of
from paceline.checkpoints.mirror import StoreMirror
from paceline.checkpoints.remote import FOLDER, POINTERS, Remote, RemoteCheckpoints
from paceline.checkpoints.uploader import CheckpointUploader
from paceline.errors import CheckpointError, UserError, printable_line
from paceline.runs.drafts import draft_of
from paceline.runs.folder import MIRROR_NOTE, RunFolder, flush, has_checkpoint
from paceline.runs.owner import LOCK, OWNER_FILE
from paceline.runs.place import owner_of, starts_anew
from paceline.runs.stores import (
    MirrorNote,
    Store,
    StoreError,
    explain,
    is_url,
    local_path,
    open_store,
    parse_note,
    read_note,
    read_own_note,
    split_checkpoint,
)
from paceline.settings.load import LoadedConfig
from paceline.settings.schema import RunConfig

Say = Callable[[str], None]


def prepare_store(loaded: LoadedConfig, say: Say) -> Callable[[], None]:
    """Before a start: check that the store answers, and fetch what is newer there than on this disk.

    Called by the process that will own the run folder. Returns a function that claims the store, to call after all
    other checks. Does nothing for a run without a store.
    """
    run = loaded.config.run
    if is_url(run.resume) and run.output_dir:
        source, wanted = split_checkpoint(run.resume)
        if source != run.output_dir.rstrip("/"):
            _fetch_source(source, wanted, loaded.where("resume"), say)
    where = loaded.where("output_dir" if run.output_dir else "resume")
    url, folder, wanted = _store_of(run, where, say)
    if not url:
        return lambda: None
    folder.refuse_if_owned()
    store = open_store(url, where)
    is_fresh = starts_anew(loaded)
    note = read_own_note(folder.path)
    try:
        if is_fresh:
            _refuse_a_second_run(store)
        else:
            fetch_run(store, folder, wanted, say)
            if run.resume != "auto" and not folder.holds_a_run:
                _refuse_a_second_run(store)  # one without a checkpoint: it may be of another source
    except StoreError as error:
        if is_fresh or note is None or not has_checkpoint(folder.path):
            raise explain(store, where, error) from error
        # The store worked before, and the local copy is enough to continue. The old token stays: when the store is
        # back, it shows whether the run was continued elsewhere meanwhile.
        say(f"warning: {url} does not answer ({error}); continuing from the local copy, {folder.path}")
        return lambda: None
    return lambda: _claim(store, folder, run, where)


def push(folder: RunFolder, say: Say) -> bool:
    """Upload what a run could not upload. Returns whether everything has arrived."""
    note = read_own_note(folder.path)
    if note is None:
        _refuse_a_copy(folder.path)
        hint = "--output-dir s3://BUCKET/RUN makes one"
        raise UserError("this run is not mirrored to a store", where=str(folder.path), hint=hint)
    folder.refuse_if_owned()
    with folder.owned():
        store = open_store(note.url, str(folder.path / MIRROR_NOTE))
        try:
            newest = next((remote.step for remote in RemoteCheckpoints(store).list() if remote.is_sealed), 0)
            own = max((step_of(path) for path in step_folders(folder.checkpoints)), default=0)
            if newest > own and _token_in(store) != note.token:
                raise UserError(
                    "the run was continued elsewhere: the store is ahead of this folder",
                    where=note.url,
                    got=f"step {newest} there, step {own} in {folder.path}",
                    hint=f"--resume {note.url} continues from there",
                )
            note = _write_token(store, folder, note)
        except StoreError as error:
            raise explain(store, str(folder.path / MIRROR_NOTE), error) from error
        say(f"uploading {folder.path} to {note.url}")
        uploader = CheckpointUploader(folder, StoreMirror(folder, note))
        uploader.start()
        return uploader.close()


def fetch_run(store: Store, folder: RunFolder, wanted: str, say: Say) -> None:
    """Fetch the wanted checkpoint, or the newest complete one if it is newer than the local ones.

    The small files with the metrics, and the best checkpoint, are fetched first. The checkpoint gets its name last, so
    the next start repeats an interrupted fetch.
    """
    remote = RemoteCheckpoints(store)
    found = {item.name: item for item in remote.list()}
    if not found:
        return
    folder.create()
    with folder.owned():
        best = remote.pointed_at("best")
        if wanted:
            name = remote.pointed_at(wanted) if wanted in POINTERS else wanted
            fetched = _fetch_named(remote, found.get(name), folder, found.get(best), say)
        else:
            fetched = _fetch_newest(remote, list(found.values()), folder, found.get(best), say)
        if fetched is None:
            return
        for pointer, name in (("latest", fetched.name), ("best", best)):
            if name and (folder.checkpoints / name).is_dir():
                disk.point(folder.checkpoints, pointer, folder.checkpoints / name)


def _fetch_companions(remote: RemoteCheckpoints, folder: RunFolder, best: Remote | None, say: Say) -> None:
    """The files that a resume needs beside the checkpoint."""
    _fetch_small_files(remote.store, folder)
    if best is None or (folder.checkpoints / best.name).exists():
        return
    try:
        _fetch(remote, best, folder, say)
    except DamagedCheckpoint as damaged:
        say(f"warning: the best checkpoint, {best.name} in {remote.store.url}, is damaged ({damaged.damage})")


# --- Checks and claims


def _store_of(run: RunConfig, where: str, say: Say) -> tuple[str, RunFolder, str]:
    """The URL of the store (empty: none), the local folder, and the checkpoint that `--resume` names."""
    named = run.output_dir or ("" if run.resume == "auto" else run.resume)
    url, wanted = split_checkpoint(run.resume) if is_url(run.resume) else ("", "")
    if is_url(named):
        place = run.output_dir.rstrip("/") or url
        return place, RunFolder(local_path(place, where)), wanted if place == url else ""
    folder = owner_of(Path(named)) if named else Path()
    note = read_own_note(folder) if named else None
    if named and note is None and (copied := read_note(folder)) is not None:
        there = printable_line(copied.url)
        say(f"note: {folder} is not mirrored: {folder / MIRROR_NOTE} names {there}, whose working copy is elsewhere")
    return (note.url if note else ""), RunFolder(folder), ""


def _refuse_a_copy(folder: Path) -> None:
    note = read_note(folder)
    if note is not None:
        raise UserError(
            "this folder is not the working copy of the store it names",
            where=str(folder / MIRROR_NOTE),
            got=printable_line(note.url),
            allowed="the folder below runs/ that a run in this store works in",
            hint="start paceline in the folder in which the run was started",
        )


def _refuse_a_second_run(store: Store) -> None:
    listed = store.list()
    if any(name in ("config.yaml", "metrics.jsonl") or name.startswith(f"{FOLDER}/step-") for name in listed):
        raise UserError(
            "this store already holds a run",
            where=store.url,
            hint="the same flags with --resume auto to continue it, or another --output-dir",
        )


def _token_in(store: Store) -> str:
    raw = store.read(MIRROR_NOTE)
    note = parse_note(raw.decode(errors="replace")) if raw else None
    return note.token if note else ""


def _claim(store: Store, folder: RunFolder, run: RunConfig, where: str) -> None:
    note = MirrorNote(store.url, keep_last=run.keep_last, keep_best=run.keep_best)
    folder.create()
    try:
        with folder.owned():  # a refused start must not claim the store of the start that owns the run
            _write_token(store, folder, note)
    except StoreError as error:
        raise explain(store, where, error) from error


def _write_token(store: Store, folder: RunFolder, note: MirrorNote) -> MirrorNote:
    """First in the store, which shows that it is writable, then on this disk."""
    note = replace(note, token=uuid.uuid4().hex, says="")
    with tempfile.TemporaryDirectory() as draft:
        note.write(Path(draft))
        store.put(Path(draft) / MIRROR_NOTE, MIRROR_NOTE)
    folder.create()
    note.write(folder.path)
    return note


# --- Fetching


def _fetch_source(url: str, wanted: str, where: str, say: Say) -> None:
    """Fetch a run that is only read: another run continues from it."""
    folder = RunFolder(local_path(url, where))
    store = open_store(url, where)
    try:
        folder.refuse_if_owned()
    except UserError:
        if not has_checkpoint(folder.path):
            raise
        # It is training on this machine: the local files are as new as those in the store, and must not be changed.
        say(f"note: {folder.path} is in use; its checkpoints are read from there")
        return
    try:
        fetch_run(store, folder, wanted, say)
    except StoreError as error:
        raise explain(store, where, error) from error


def _fetch_named(
    remote: RemoteCheckpoints, item: Remote | None, folder: RunFolder, best: Remote | None, say: Say
) -> Path | None:
    """None if there is no such checkpoint. The resume reports it."""
    if item is None or (folder.checkpoints / item.name).exists():
        return folder.checkpoints / item.name if item else None
    try:
        return _fetch_last(remote, item, folder, best, say)
    except DamagedCheckpoint as found:
        raise CheckpointError(
            "the checkpoint is damaged and was not used",
            where=f"{remote.store.url}/{FOLDER}/{item.name}/{found.damage.file}",
            got=found.damage.got,
            allowed=found.damage.expected,
            hint=f"--resume {remote.store.url} uses the newest complete one",
        ) from found


def _fetch_newest(
    remote: RemoteCheckpoints, found: list[Remote], folder: RunFolder, best: Remote | None, say: Say
) -> Path | None:
    own = max((step_of(path) for path in step_folders(folder.checkpoints)), default=-1)
    for item in found:
        if item.step <= own:
            return None
        if not item.is_sealed:
            say(f"note: {item.name} in {remote.store.url} is not complete; the one before is used")
            continue
        try:
            return _fetch_last(remote, item, folder, best, say)
        except NewerSchema as newer:
            raise disk.damaged_error(Path(item.name), newer) from newer
        except DamagedCheckpoint as damaged:
            say(f"warning: {item.name} in {remote.store.url} is damaged ({damaged.damage}); the one before is used")
    return None


def _fetch_last(remote: RemoteCheckpoints, item: Remote, folder: RunFolder, best: Remote | None, say: Say) -> Path:
    """Download and verify it, fetch its companions, then give it its name."""
    other = best if best is not None and best.name != item.name else None
    return _fetch(remote, item, folder, say, lambda: _fetch_companions(remote, folder, other, say))


def _fetch(
    remote: RemoteCheckpoints,
    item: Remote,
    folder: RunFolder,
    say: Say,
    before_naming: Callable[[], None] = lambda: None,
) -> Path:
    size_mb = sum(stored.size_bytes for stored in item.files.values()) / 1e6
    say(f"fetching {item.name} ({size_mb:,.1f} MB) from {remote.store.url}")
    try:
        return remote.fetch(item, folder.checkpoints, before_naming)
    except StoreError:
        raise
    except OSError as error:
        raise CheckpointError(
            "a checkpoint cannot be stored here", where=str(folder.path), got=error.strerror
        ) from error


def _fetch_small_files(store: Store, folder: RunFolder) -> None:
    """Metrics, logs and other files, to which the run appends."""
    for name in store.list():
        parts = name.split("/")
        is_wanted = parts[0] != FOLDER and name not in (MIRROR_NOTE, LOCK, OWNER_FILE)
        if is_wanted and not any(part in ("", "..") or part.startswith(".") for part in parts):
            target = folder.path.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = draft_of(target)  # an incomplete file must not have the final name
            try:
                store.get(name, draft)
                flush(draft)
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
    flush(folder.path)
