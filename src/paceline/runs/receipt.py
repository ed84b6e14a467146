"""The receipt of a run, `receipt.json`: a chain of hashes over everything that decides its result, and over the result.

A link has a name, its content, and a hash of both and of the link before it. So the last hash, the head, depends on
every byte. `paceline sign` signs the file with an ssh key. No torch: a broken chain is found at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import UserError
from paceline.runs.json_files import COUNT, MAYBE, Fields, ListOf, MapOf, fit
from paceline.settings.small_files import read_json_object

RECEIPT_SCHEMA = 1  # increased when a link changes its meaning
NO_HASH = "0" * 64  # before the first link
_CHUNK_BYTES = 1 << 20
LINKS = ("config", "code", "packages", "machine", "data", "order", "checkpoints", "metrics", "results")
ENTRY = Fields(  # of a saved checkpoint, in the receipt and in checkpoints.jsonl
    required={"step": COUNT, "tensors": MapOf(str), "state": str, "ranks": COUNT, "previous": str, "hash": str},
    optional={"config": str},
)
_PART = Fields(required={"samples": COUNT, "labels": str, "kind": str})
_FINGERPRINT = Fields(required={"classes": str, "num_classes": COUNT, "sample_shape": ListOf(COUNT), "train": _PART})
_CHANGE = Fields(required={"step": COUNT})  # of the data, which the user has accepted
_CONTENTS = {
    "config": MapOf(None),
    "code": Fields(required={"paceline": str, "source_sha256": str, "functions": MapOf(str)}),
    "packages": MapOf(str),
    "machine": Fields(required={"processor": str, "instructions": str, "ranks": COUNT, "lanes": COUNT}),
    "data": Fields(required={"fingerprint": _FINGERPRINT, "split": str, "accepted": ListOf(_CHANGE)}),
    "order": MapOf((COUNT, str)),
    "checkpoints": ListOf(ENTRY),
    "metrics": MapOf(str),
    "results": Fields(
        required={
            **{"sha256": str, "steps": COUNT, "weights_sha256": str},
            **dict.fromkeys(("test_accuracy", "test_loss"), (float, MAYBE)),
        }
    ),
}
_LINK = Fields(required={"name": str, "content": None, "hash": str})
_SHAPE = Fields(required={"schema_version": int, "run": str, "links": ListOf(_LINK), "head": str})


@dataclass(frozen=True)
class Receipt:
    run: str  # the name of its folder
    links: dict[str, Any]  # contents by name
    head: str
    broken_at: str | None  # the first link whose hash is wrong; None if the chain is whole


def hash_link(previous: str, content: Any) -> str:
    """The hash of a link of a chain: of its content and of the link before it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


def make_receipt(run: str, contents: dict[str, Any]) -> dict[str, Any]:
    """The content of receipt.json."""
    links, head = [], NO_HASH
    for name in LINKS:
        head = hash_link(head, [name, contents[name]])
        links.append({"name": name, "content": contents[name], "hash": head})
    return {"schema_version": RECEIPT_SCHEMA, "run": run, "links": links, "head": head}


def read_receipt(path: Path) -> Receipt:
    """UserError for a file that is no receipt, and for one of a newer version. A broken chain is no error here."""
    try:
        values = read_json_object(path)
        if isinstance(values.get("schema_version"), int) and values["schema_version"] > RECEIPT_SCHEMA:
            raise UserError(
                "the receipt was written by a newer Paceline",
                where=str(path),
                got=f"schema {values['schema_version']}",
                allowed=f"schema {RECEIPT_SCHEMA}",
                hint="update paceline; paceline checkpoints RUN --verify checks the checkpoints without a receipt",
            )
        found = fit(values, _SHAPE)
        names = tuple(link["name"] for link in values["links"])
        if names != LINKS or len(found["links"]) != len(LINKS):
            raise ValueError(f"links {', '.join(names)[:200]}")
        for link in values["links"]:
            fit(link["content"], _CONTENTS[link["name"]])
    except FileNotFoundError as error:
        raise UserError(
            "there is no receipt",
            where=str(path),
            hint="a run of this version writes it when it is finished; --resume auto finishes a run",
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("this is not a receipt", where=str(path), got=error, allowed="receipt.json of a run") from error
    links, head, broken_at = {}, NO_HASH, None
    for link in values["links"]:
        head = hash_link(head, [link["name"], link["content"]])
        broken_at = broken_at or (link["name"] if head != link["hash"] else None)
        links[link["name"]] = link["content"]
    broken_at = broken_at or ("head" if head != values["head"] else None)
    return Receipt(found["run"], links, head, broken_at)


def hash_file(path: Path) -> str:
    """SHA-256 of a file; empty if there is none. Another person may have put a FIFO or a device in its place."""
    digest = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            digest.update(chunk)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def hash_package() -> str:
    """SHA-256 of all Python files of Paceline: one changed line changes it."""
    root, digest = Path(paceline.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{hash_file(path)}\n".encode())
    return digest.hexdigest()
