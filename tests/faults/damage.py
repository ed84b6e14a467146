"""Damage to a checkpoint: accidents, and forgeries that follow the format and have a valid manifest seal."""

from __future__ import annotations

import json
import os
import pickle
import random
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


# --- Accidents: each one is applied to the newest checkpoint ----------------------------------------------------------


def cut(name: str, keep: Callable[[int], int], folder: Path) -> None:
    os.truncate(folder / name, keep((folder / name).stat().st_size))


def delete(name: str, folder: Path) -> None:
    (folder / name).unlink()


def zero_the_tail(name: str, folder: Path) -> None:
    with (folder / name).open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def flip_a_bit(name: str, where: float, bit: int, folder: Path) -> None:
    """`where`: between 0 (the first byte) and 1 (after the last)."""
    content = bytearray((folder / name).read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    (folder / name).write_bytes(content)


def accidents() -> dict[str, tuple[str, Callable[[Path], None]]]:
    found: dict[str, tuple[str, Callable[[Path], None]]] = {
        "truncated to half": (FILES[0], partial(cut, FILES[0], lambda size: size // 2)),
        "last 100 bytes cut": (FILES[1], partial(cut, FILES[1], lambda size: size - 100)),
        "deleted": (FILES[1], partial(delete, FILES[1])),
        "zeroed tail": (FILES[0], partial(zero_the_tail, FILES[0])),
    }
    draw = random.Random(2026)
    for number in range(50):
        name = FILES[number % len(FILES)]
        found[f"bit {number} flipped in {name}"] = (name, partial(flip_a_bit, name, draw.random(), draw.randrange(8)))
    return found


ACCIDENTS = accidents()
assert len(ACCIDENTS) == 54


# --- Forgeries: the forger knows the format and seals the manifest ----------------------------------------------------


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def seal(text: bytes) -> bytes:
    """Seal a manifest as docs/checkpoints.md describes it. A second implementation, independent of the source."""
    return text.removesuffix(b"\n}") + b',\n "crc32": "%08x"\n}\n' % zlib.crc32(text)


def forge(folder: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> None:
    """Write the manifest that belongs to the files of a folder, change it, and seal it again."""
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["crc32"]
    for name, entry in body["files"].items():
        content = (folder / name).read_bytes()
        entry.update(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
    change(body)
    (folder / "manifest.json").write_bytes(seal(json.dumps(body, indent=1, sort_keys=True).encode()))


def canary_as(name: str, folder: Path) -> None:
    (folder / name).write_bytes(pickle.dumps(Canary(folder.parent / "canary")))
    forge(folder)


def canary_listed_as(name: str, folder: Path) -> None:
    content = pickle.dumps(Canary(folder.parent / "canary"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    entry = {"size_bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    forge(folder, lambda body: body["files"].update({name: entry}))


def listed_as(name: str, folder: Path) -> None:
    forge(folder, lambda body: body["files"].update({name: body["files"].pop("model.safetensors")}))


def linked_payload(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside")
    (folder / "model.safetensors").symlink_to(folder.parent / "outside")


def linked_state(folder: Path) -> None:
    (folder / "state.json").rename(folder.parent / "outside")
    (folder / "state.json").symlink_to(folder.parent / "outside")


def ten_gigabytes_claimed(folder: Path) -> None:
    forge(folder, lambda body: body["files"]["model.safetensors"].update(size_bytes=10 * 10**9))


def ten_gigabytes_of_holes(folder: Path) -> None:
    ten_gigabytes_claimed(folder)
    os.truncate(folder / "model.safetensors", 10 * 10**9)


def header_that_claims_gigabytes(folder: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**82]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    forge(folder)


def deep(depth: int = 200_000) -> bytes:
    return b"[" * depth + b"]" * depth


def deep_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(seal(b'{\n "about": ' + deep() + b"\n}"))


def deep_state(folder: Path) -> None:
    (folder / "state.json").write_bytes(b'{"step": 18, "config": ' + deep() + b"}")
    forge(folder)


def huge_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 100 * 10**6)


def manifest_without_an_end(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def folder_as_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def newer_schema(folder: Path) -> None:
    forge(folder, lambda body: body.update(schema=2))


def no_about(folder: Path) -> None:
    forge(folder, lambda body: body.pop("about"))


def infinite_step(folder: Path) -> None:
    (folder / "state.json").write_text('{"step": Infinity}')
    forge(folder)


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickle as model": (partial(canary_as, "model.safetensors"), "model.safetensors"),
    "pickle as state": (partial(canary_as, "state.json"), "state.json"),
    "pickle listed as .metadata": (partial(canary_listed_as, ".metadata"), "'.metadata'"),
    "pickle listed as optimizer.pt": (partial(canary_listed_as, "optimizer.pt"), "'optimizer.pt'"),
    "pickle listed as the generators' state": (partial(canary_listed_as, "rng_state.pkl"), "'rng_state.pkl'"),
    "pickle listed as the data set's index": (partial(canary_listed_as, "data/index.npy"), "'data/index.npy'"),
    "name with ..": (partial(listed_as, "../model.safetensors"), "'../model.safetensors'"),
    "absolute name": (partial(listed_as, "/etc/passwd"), "'/etc/passwd'"),
    "linked payload": (linked_payload, "a link or folder"),
    "linked state": (linked_state, "a link or folder"),
    "10 GB claimed": (ten_gigabytes_claimed, "10,000,000,000 bytes"),
    "10 GB of holes": (ten_gigabytes_of_holes, "model.safetensors"),
    "header that claims gigabytes": (header_that_claims_gigabytes, "model.safetensors"),
    "deep manifest": (deep_manifest, "manifest.json"),
    "deep state": (deep_state, "state.json"),
    "manifest of 100 MB": (huge_manifest, "100,000,000"),
    "manifest without an end": (manifest_without_an_end, "manifest.json"),
    "folder as manifest": (folder_as_manifest, "manifest.json"),
    "newer schema": (newer_schema, "schema 2"),
    "no origin": (no_about, "manifest.json"),
    "infinite step": (infinite_step, "state.json"),
}
