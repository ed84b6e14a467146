"""The objects of a run in an object store. Any user with write access may have changed them."""

from __future__ import annotations

import shutil
from pathlib import Path

from fuzz.checkpoint_formats import mutate_manifest
from fuzz.mutations import Mutate, mutate_bytes, mutate_json
from fuzz.run_formats import ONE, build_finished
from fuzz.sandbox import Format, Reader

_STEP = "step-00000006"
_POINTERS = ("latest", "best")


def _build(samples: Path, folder: Path) -> None:
    """A store on a disk has the files of a run folder. Its pointers are text."""
    build_finished(samples, folder)
    store = folder / "store"
    (folder / ONE).rename(store)
    shutil.rmtree(folder / "runs")  # a folder that a reader changes is copied again for every case
    for pointer in _POINTERS:
        (store / "checkpoints" / pointer).unlink(missing_ok=True)
        (store / "checkpoints" / pointer).write_text(f"{_STEP}\n")


def _seal_state_again(folder: Path) -> None:
    from paceline.checkpoints.format import MANIFEST, STATE, FileSeal, Manifest, checksum_of, parse_manifest

    step = folder / "store" / "checkpoints" / _STEP
    valid = step.parent.parent / "valid-manifest.json"
    if not valid.exists():
        valid.write_bytes((step / MANIFEST).read_bytes())
    manifest = parse_manifest(valid.read_bytes())
    seal = FileSeal((step / STATE).stat().st_size, checksum_of(step / STATE))
    (step / MANIFEST).write_bytes(Manifest({**manifest.files, STATE: seal}, manifest.about).to_bytes())


def _fetch(wanted: str, folder: Path) -> None:
    from paceline.checkpoints.fetch import fetch_run
    from paceline.runs.folder import RunFolder
    from paceline.runs.stores import open_store

    fetch_run(open_store(f"file://{folder}/store", "--resume"), RunFolder(folder / "copy"), wanted, lambda line: None)


def _prune(folder: Path) -> None:
    from paceline.checkpoints.remote import RemoteCheckpoints
    from paceline.checkpoints.store import Retention
    from paceline.runs.stores import open_store

    remote = RemoteCheckpoints(open_store(f"file://{folder}/store", "--resume"))
    remote.remember()
    remote.prune(_STEP, {}, Retention(1, 1), went_back=True)


def _token(folder: Path) -> None:
    from paceline.checkpoints.fetch import _token_in
    from paceline.runs.stores import open_store

    _token_in(open_store(f"file://{folder}/store", "--resume"))


READERS = (
    Reader("resume", lambda folder: _fetch("", folder), changes_folder=True, every=5),
    Reader("resume from best", lambda folder: _fetch("best", folder), changes_folder=True, every=5),
    Reader("prune", _prune, changes_folder=True, every=2),
)


def _file(name: str, mutate: Mutate, *readers: Reader) -> Format:
    return Format(f"store/{name}", _build, f"store/{name}", mutate, readers or READERS)


FORMATS = (
    _file(f"checkpoints/{_STEP}/manifest.json", mutate_manifest),
    Format(
        "store/state.json",
        _build,
        f"store/checkpoints/{_STEP}/state.json",
        mutate_json,
        READERS,
        prepare=_seal_state_again,
    ),
    _file("checkpoints/best", mutate_bytes),
    _file("mirror.json", mutate_json, Reader("start", _token)),
)
