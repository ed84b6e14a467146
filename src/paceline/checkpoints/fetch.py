"""A run comes from its object store to this machine, and says there that it is written from here now."""

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
from paceline.runs.mirror_note import MirrorNote, parse_note, read_note, read_own_note
from paceline.runs.owner import LOCK, OWNER_FILE
from paceline.runs.place import owner_of
from paceline.runs.stores import Store, StoreTrouble, explain, is_url, local_path, open_store, split_checkpoint
from paceline.settings.load import LoadedConfig
from paceline.settings.schema import RunConfig

_Tell = Callable[[str], None]


def prepare_store(loaded: LoadedConfig, tell: _Tell) -> Callable[[], None]:
    """Before anything starts: the store answers, and what it holds newer than this disk is here.

    Called by whoever will own the run folder. Returns what to call when nothing else speaks against the start: it
    claims the store for it. Does nothing for a run that lives on this disk only.
    """
    run = loaded.config.run
    if is_url(run.resume) and run.output_dir:
        source, wanted = split_checkpoint(run.resume)
        if source != run.output_dir.rstrip("/"):
            _fetch_source(source, wanted, loaded.where("resume"), tell)
    where = loaded.where("output_dir" if run.output_dir else "resume")
    url, folder, wanted = _store_of(run, where, tell)
    if not url:
        return lambda: None
    folder.refuse_if_owned()
    store = open_store(url, where)
    is_fresh = not run.resume or (run.resume == "auto" and run.load_policy == "none")
    note = read_own_note(folder.path)
    try:
        if is_fresh:
            _refuse_a_second_run(store)
        else:
            fetch_run(store, folder, wanted, tell)
            if run.resume != "auto" and not folder.holds_a_run:
                _refuse_a_second_run(store)  # one without a checkpoint: it may be of another source
    except StoreTrouble as trouble:
        if is_fresh or note is None or not has_checkpoint(folder.path):
            raise explain(store, where, trouble) from trouble
        # Known to work, and now away: what is here is enough to go on with. The old token tells, once the store is
        # back, whether the run was continued elsewhere meanwhile.
        tell(f"warning: {url} does not answer ({trouble}); going on from the copy here, {folder.path}")
        return lambda: None
    return lambda: _claim(store, folder, run, where)


def push(folder: RunFolder, tell: _Tell) -> bool:
    """Send to the store what a run could not; whether everything has arrived."""
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
                    "the run has gone on elsewhere: the store is ahead of this folder",
                    where=note.url,
                    got=f"step {newest} there, step {own} in {folder.path}",
                    hint=f"--resume {note.url} takes it up from there",
                )
            note = _write_token(store, folder, note)
        except StoreTrouble as trouble:
            raise explain(store, str(folder.path / MIRROR_NOTE), trouble) from trouble
        tell(f"sending {folder.path} to {note.url}")
        uploader = CheckpointUploader(folder, StoreMirror(folder, note))
        uploader.start()
        return uploader.close()


def fetch_run(store: Store, folder: RunFolder, wanted: str, tell: _Tell) -> None:
    """The checkpoint that was asked for, or else the newest whole one if it is newer than those here.

    What belongs to it comes first: the small files, the metrics among them, and the best checkpoint. It gets its name
    last, so an interrupted fetch is done again by the next start.
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
            fetched = _fetch_named(remote, found.get(name), folder, found.get(best), tell)
        else:
            fetched = _fetch_newest(remote, list(found.values()), folder, found.get(best), tell)
        if fetched is None:
            return
        for pointer, name in (("latest", fetched.name), ("best", best)):
            if name and (folder.checkpoints / name).is_dir():
                disk.point(folder.checkpoints, pointer, folder.checkpoints / name)


def _fetch_companions(remote: RemoteCheckpoints, folder: RunFolder, best: Remote | None, tell: _Tell) -> None:
    """What a checkpoint needs beside it."""
    _fetch_small_files(remote.store, folder)
    if best is None or (folder.checkpoints / best.name).exists():
        return
    try:
        _fetch(remote, best, folder, tell)
    except DamagedCheckpoint as damaged:
        tell(f"warning: the best checkpoint, {best.name} in {remote.store.url}, is damaged ({damaged.damage})")


# --- What is where


def _store_of(run: RunConfig, where: str, tell: _Tell) -> tuple[str, RunFolder, str]:
    """The URL that this run is mirrored to, its folder here, and the checkpoint that was named; no URL: no store."""
    named = run.output_dir or ("" if run.resume == "auto" else run.resume)
    url, wanted = split_checkpoint(run.resume) if is_url(run.resume) else ("", "")
    if is_url(named):
        place = run.output_dir.rstrip("/") or url
        return place, RunFolder(local_path(place, where)), wanted if place == url else ""
    folder = owner_of(Path(named)) if named else Path()
    note = read_own_note(folder) if named else None
    if named and note is None and (copied := read_note(folder)) is not None:
        there = printable_line(copied.url)
        tell(f"note: {folder} is not mirrored: {folder / MIRROR_NOTE} names {there}, whose working copy is elsewhere")
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
            hint="--resume auto to go on with it, or another --output-dir",
        )


def _token_in(store: Store) -> str:
    raw = store.read(MIRROR_NOTE)
    note = parse_note(raw.decode(errors="replace")) if raw else None
    return note.token if note else ""


def _claim(store: Store, folder: RunFolder, run: RunConfig, where: str) -> None:
    note = MirrorNote(store.url, keep_last=run.keep_last, keep_best=run.keep_best)
    folder.create()
    try:
        with folder.owned():  # a start that is refused must not take the store from the one that owns the run
            _write_token(store, folder, note)
    except StoreTrouble as trouble:
        raise explain(store, where, trouble) from trouble


def _write_token(store: Store, folder: RunFolder, note: MirrorNote) -> MirrorNote:
    """First in the store, which proves that it can be written, then here."""
    note = replace(note, token=uuid.uuid4().hex, says="")
    with tempfile.TemporaryDirectory() as draft:
        note.write(Path(draft))
        store.put(Path(draft) / MIRROR_NOTE, MIRROR_NOTE)
    folder.create()
    note.write(folder.path)
    return note


# --- Fetching


def _fetch_source(url: str, wanted: str, where: str, tell: _Tell) -> None:
    """A run that is only read: another one goes on from it."""
    folder = RunFolder(local_path(url, where))
    store = open_store(url, where)
    try:
        folder.refuse_if_owned()
    except UserError:
        if not has_checkpoint(folder.path):
            raise
        # It is in training on this machine: what is here is as new as what the store holds, and not ours to change.
        tell(f"note: {folder.path} is in use; its checkpoints are read from there")
        return
    try:
        fetch_run(store, folder, wanted, tell)
    except StoreTrouble as trouble:
        raise explain(store, where, trouble) from trouble


def _fetch_named(
    remote: RemoteCheckpoints, item: Remote | None, folder: RunFolder, best: Remote | None, tell: _Tell
) -> Path | None:
    """None: there is no such checkpoint, which the caller of the caller tells."""
    if item is None or (folder.checkpoints / item.name).exists():
        return folder.checkpoints / item.name if item else None
    try:
        return _fetch_last(remote, item, folder, best, tell)
    except DamagedCheckpoint as found:
        raise CheckpointError(
            "the checkpoint is damaged and was not used",
            where=f"{remote.store.url}/{FOLDER}/{item.name}/{found.damage.file}",
            got=found.damage.got,
            allowed=found.damage.expected,
            hint=f"--resume {remote.store.url} takes the newest that is whole",
        ) from found


def _fetch_newest(
    remote: RemoteCheckpoints, found: list[Remote], folder: RunFolder, best: Remote | None, tell: _Tell
) -> Path | None:
    own = max((step_of(path) for path in step_folders(folder.checkpoints)), default=-1)
    for item in found:
        if item.step <= own:
            return None
        if not item.is_sealed:
            tell(f"note: {item.name} in {remote.store.url} is not complete; the one before is taken")
            continue
        try:
            return _fetch_last(remote, item, folder, best, tell)
        except NewerSchema as newer:
            raise disk.damaged_error(Path(item.name), newer) from newer
        except DamagedCheckpoint as damaged:
            tell(f"warning: {item.name} in {remote.store.url} is damaged ({damaged.damage}); the one before is taken")
    return None


def _fetch_last(remote: RemoteCheckpoints, item: Remote, folder: RunFolder, best: Remote | None, tell: _Tell) -> Path:
    """Download and verify it, fetch its companions, then give it its name."""
    other = best if best is not None and best.name != item.name else None
    return _fetch(remote, item, folder, tell, lambda: _fetch_companions(remote, folder, other, tell))


def _fetch(
    remote: RemoteCheckpoints,
    item: Remote,
    folder: RunFolder,
    tell: _Tell,
    before_naming: Callable[[], None] = lambda: None,
) -> Path:
    size_mb = sum(stored.size_bytes for stored in item.files.values()) / 1e6
    tell(f"fetching {item.name} ({size_mb:,.1f} MB) from {remote.store.url}")
    try:
        return remote.fetch(item, folder.checkpoints, before_naming)
    except StoreTrouble:
        raise
    except OSError as error:
        raise CheckpointError(
            "a checkpoint cannot be stored here", where=str(folder.path), got=error.strerror
        ) from error


def _fetch_small_files(store: Store, folder: RunFolder) -> None:
    """Metrics, logs and the like: the run goes on writing them where it stopped."""
    for name in store.list():
        parts = name.split("/")
        is_ours = parts[0] != FOLDER and name not in (MIRROR_NOTE, LOCK, OWNER_FILE)
        if is_ours and not any(part in ("", "..") or part.startswith(".") for part in parts):
            target = folder.path.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = draft_of(target)  # half a file must not look like one
            try:
                store.get(name, draft)
                flush(draft)
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
    flush(folder.path)
