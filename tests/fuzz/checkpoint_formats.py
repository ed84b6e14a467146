"""A checkpoint's files. A forger knows CRC-32: most mutations get correct sizes and checksums again."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutations import Mutate, mutate_json, mutate_safetensors
from fuzz.run_formats import CHECKPOINTS, ONE, build_finished
from fuzz.sandbox import Format, Reader
from paceline.cli.command import run_verb

STEP = f"{ONE}/checkpoints/step-00000006"
PICTURE = "picture.png"


def _seal_again(folder: Path) -> None:
    """Sizes and checksums of all files, as the code that commits a checkpoint writes them."""
    from paceline.checkpoints.format import MANIFEST, FileSeal, Manifest, checksum_of, parse_manifest

    step = folder / STEP
    about = parse_manifest((folder / "valid-manifest.json").read_bytes()).about
    names = [path.name for path in sorted(step.iterdir()) if path.name != MANIFEST]
    seals = {name: FileSeal((step / name).stat().st_size, checksum_of(step / name)) for name in names}
    (step / MANIFEST).write_bytes(Manifest(seals, about).to_bytes())


def _build(samples: Path, folder: Path) -> None:
    from PIL import Image

    build_finished(samples, folder)
    Image.new("RGB", (40, 30), "red").save(folder / PICTURE)
    (folder / "valid-manifest.json").write_bytes((folder / STEP / "manifest.json").read_bytes())


def mutate_manifest(data: bytes, draw: Random) -> bytes:
    """The body of a manifest, with a correct checksum in three of four cases."""
    from paceline.checkpoints.format import _SEAL_BYTES, _seal

    body = data[:-_SEAL_BYTES] + b"\n}"
    mutated = mutate_json(body, draw)
    return _seal(mutated) if draw.randrange(4) else mutated


@lru_cache(maxsize=1)
def _rig() -> Any:
    from paceline.training.reuse import open_run

    return open_run(Path(ONE), [])


def _resume(folder: Path) -> None:
    """Like a rank that resumes: select, compare with the config, restore every tensor and the counters."""
    from paceline.checkpoints.resume import choose_checkpoint
    from paceline.training.components import build_components

    run = _rig()
    checkpoint = choose_checkpoint(folder / ONE, run.world, prefer_best=False)
    if checkpoint is not None:
        components = build_components(run.config, run.world, load_weights=False, checkpoint=checkpoint)
        components.resume(checkpoint, run.world)


def _weights(folder: Path) -> None:
    from paceline.checkpoints.resume import choose_checkpoint, restore_weights

    run = _rig()
    checkpoint = choose_checkpoint(folder / STEP, run.world, prefer_best=True)
    if checkpoint is not None:
        restore_weights(checkpoint, run.model.module)


def _label(folder: Path) -> None:
    from paceline.library.predictions import open_model, predict

    predict(open_model(folder / STEP, ""), folder / PICTURE)


def _evaluate(folder: Path) -> None:
    run_verb("evaluate", [STEP, "--device=cpu"])


def _export(folder: Path) -> None:
    from paceline.training.export import export_run

    export_run(folder / STEP, "safetensors", folder / "export", [])


def _show_source(folder: Path) -> None:
    from paceline.training.reuse import stored_source

    stored_source(folder / STEP)


def _newest(folder: Path) -> None:
    from paceline.checkpoints.store import find_newest

    found, _ = find_newest(folder / ONE / "checkpoints")
    assert found is not None, "an older checkpoint is complete"


def _early(folder: Path) -> None:
    from paceline.checkpoints.identity import refuse_early
    from paceline.settings.schema import flatten

    refuse_early(folder / ONE, flatten(_rig().config))


def _start_from(folder: Path) -> None:
    from paceline.checkpoints.resume import start_from

    start_from(_rig().model.module, folder / STEP)


def _compare(folder: Path) -> None:
    from paceline.checkpoints.difference import compare_newest

    compare_newest(folder / ONE, folder / "runs/two")


def _prune(folder: Path) -> None:
    from paceline.checkpoints.store import Retention, prune

    prune(folder / ONE / "checkpoints", Retention())


def _open(folder: Path) -> None:
    from paceline.checkpoints.store import open_checkpoint

    open_checkpoint(folder / STEP)


USES = (
    Reader("run.predict", _label, every=4),
    Reader("evaluate", _evaluate, every=8, changes_folder=True),
    Reader("export", _export, every=8, changes_folder=True),
    Reader("run.source", _show_source),
)
READERS = (
    Reader("open", _open),
    CHECKPOINTS,
    Reader("the newest whole one", _newest, changes_folder=True, every=8),
    Reader("resume, before ranks start", _early, every=5),
    Reader("resume", _resume, changes_folder=True, every=20),
    Reader("weights of a run", _weights, every=20),
    Reader("--init-from", _start_from, every=20),
    Reader("compare", _compare, every=20),
    Reader("prune", _prune, changes_folder=True, every=20),
    *USES,
)


def _mutate_record(data: bytes, draw: Random) -> bytes:
    """Only the record of the model, a small part of the state. In half of the cases two of its parts."""
    values = json.loads(data)
    record = values["record"]
    for name in draw.sample(sorted(record), draw.choice((1, 2))):
        try:
            record[name] = json.loads(mutate_json(json.dumps(record[name]).encode(), draw))
        except (ValueError, RecursionError):
            record[name] = draw.choice(([], {}, None, 0, "", -1, 2**62))
    return json.dumps(values).encode()


# --- Slices of several ranks


def _build_slices(samples: Path, folder: Path) -> None:
    """Two ranks' halves of a matrix, a vector in a type that safetensors does not have, and a complete scalar."""
    import torch

    from paceline.checkpoints.payload import Box, Piece, write_pieces

    for rank in range(2):
        pieces = {
            "w": Piece(torch.full((2, 3), float(rank)), Box((2 * rank, 0), (2, 3)), (4, 3)),
            "z": Piece(torch.ones(2, dtype=torch.complex64) * rank, Box((2 * rank,), (2,)), (4,)),
        }
        if rank == 0:
            pieces["n"] = Piece(torch.tensor(3), Box((), ()), ())
        write_pieces(folder / f"model-{rank}.safetensors", pieces)


def _read_slices(folder: Path) -> None:
    """Every value comes from a file: uninitialized memory would be detected."""
    from paceline.checkpoints.payload import PayloadReader

    reader = PayloadReader(folder, ["model-0.safetensors", "model-1.safetensors"])
    for key in reader.shapes:
        reader.read(key)


def _mutate_slices(data: bytes, draw: Random) -> bytes:
    """In half of the cases only the slices of a rank, which are JSON in the header's JSON."""
    if draw.randrange(2):
        return mutate_safetensors(data, draw)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = draw.choice([name for name in header["__metadata__"] if name.startswith("paceline_")])
    mutated = mutate_json(header["__metadata__"][name].encode(), draw)
    header["__metadata__"][name] = mutated.decode(errors="replace")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _file(name: str, mutate: Mutate, **more: Any) -> Format:
    return Format(f"checkpoint/{name}", _build, f"{STEP}/{name}", mutate, READERS, **more)


_SEALED = (
    _file("state.json", mutate_json, prepare=_seal_again),
    _file("model.safetensors", mutate_safetensors, prepare=_seal_again),
    _file("optimizer.safetensors", mutate_safetensors, prepare=_seal_again),
)
FORMATS = (
    _file("manifest.json", mutate_manifest),
    Format(
        "checkpoint/slices",
        _build_slices,
        "model-1.safetensors",
        _mutate_slices,
        (Reader("read every tensor", _read_slices),),
    ),
    *_SEALED,
    Format("checkpoint/record", _build, f"{STEP}/state.json", _mutate_record, USES, prepare=_seal_again),
    dataclasses.replace(
        _file("model.safetensors", mutate_safetensors), name="checkpoint/model.safetensors, with its old checksum"
    ),
)
