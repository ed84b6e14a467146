"""Checks between ranks before the first step: the same program, config, data and functions, and a shared run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from functools import cache
from pathlib import Path

import torch

import paceline
from paceline.errors import EXIT_USER, EndsWithPrimary, UserError
from paceline.parallel.collectives import broadcast_text, gather_texts
from paceline.runs.folder import RunFolder, has_checkpoint
from paceline.runs.place import RunPlace
from paceline.runs.shared_token import NODE_LOCAL, find_token, not_shared, remove_token, write_token
from paceline.runtime.detect import RankEnvironment, World
from paceline.settings.schema import Config, flatten
from paceline.settings.syntax import CodeReference

# These may differ between ranks: places of files, and injected faults.
_OWN = ("data_dir", "output_dir", "num_workers", "cache_dir", "inject")


@cache
def hash_code() -> str:
    """Of every source file of this package."""
    digest = hashlib.sha256()
    root = Path(paceline.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def require_same_ranks(config: Config, world: World) -> Config:
    """Collective: compares config and code of all ranks before anything is built. Returns the config they agree on.

    Under --auto-microbatch only the node that ran out of memory asks for more microbatches. All ranks use the
    largest number.
    """
    values = {name: value for name, value in flatten(config).items() if name not in _OWN}
    mine = {"config": values, "code": hash_code(), "paceline": paceline.__version__, "torch": torch.__version__}
    entries = [json.loads(text) for text in gather_texts(json.dumps({**mine, "host": world.host}), world)]
    if all(entry["config"]["auto_microbatch"] for entry in entries):
        most = max(entry["config"]["accumulate"] for entry in entries)
        for entry in entries:
            entry["config"]["accumulate"] = most
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=most))
    require_equal(entries)
    return config


def require_same_data(fingerprint: str, world: World) -> None:
    """Collective: compares what each rank read from its disk."""
    mine = {"data": fingerprint, "host": world.host}
    require_equal([json.loads(text) for text in gather_texts(json.dumps(mine), world)])


def require_same_functions(code: dict[CodeReference, str], world: World) -> None:
    """Collective: compares the user's functions as each rank has compiled them. Files may differ between nodes."""
    mine = {"functions": {item.name: digest for item, digest in code.items()}, "host": world.host}
    require_equal([json.loads(text) for text in gather_texts(json.dumps(mine), world)])


def require_equal(entries: list[dict[str, object]]) -> None:
    """Name the ranks that differ from most, and in what."""
    for kind in ("code", "paceline", "torch", "data", "config", "functions"):
        texts = [json.dumps(entry.get(kind), sort_keys=True) for entry in entries]
        usual, _ = Counter(texts).most_common(1)[0]
        odd = [rank for rank, text in enumerate(texts) if text != usual]
        if not odd:
            continue
        first = odd[0]
        difference = _difference(json.loads(usual), json.loads(texts[first]))
        raise UserError(
            f"the ranks do not have the same {kind}",
            where="rank " + ", ".join(f"{rank} on {entries[rank].get('host')}" for rank in odd[:8]),
            got=f"rank {first} {difference}",
            hint="start every rank with the same command, from the same installation and the same data",
        )


def _difference(usual: object, odd: object) -> str:
    if isinstance(usual, dict) and isinstance(odd, dict):
        names = [name for name in usual if usual[name] != odd.get(name)]
        return "; ".join(f"has {name} {odd.get(name)!r}, the others {usual[name]!r}" for name in names[:3])
    return f"has {odd}, the others {usual}"


def require_shared_folder(place: RunPlace, world: World, environment: RankEnvironment) -> None:
    """Collective. Raises UserError on the primary and on each node that misses a folder; the other ranks end with them.

    Without this check the nodes would train for an epoch, and then one would not find what another has saved.
    """
    if environment.is_on_one_node or world.world_size == 1:
        return
    # By the path of this rank: a relative path depends on the working folder.
    folders = [place.folder, RunFolder(place.folder).checkpoints]  # checkpoints may be on another disk
    tokens = _write_tokens(folders, world)
    try:
        found = {} if os.environ.get(NODE_LOCAL) else _find_missing(folders, tokens, place)
        answers = [json.loads(text) for text in gather_texts(json.dumps({"host": world.host, "found": found}), world)]
    finally:
        if world.is_primary:
            for folder, (_, name) in zip(folders, tokens, strict=True):
                remove_token(folder, name)
    troubles = {answer["host"]: answer["found"] for answer in answers if answer["found"]}
    if not troubles:
        return
    error = not_shared(troubles, answers[0]["host"])
    if world.is_primary or (found and world.local_rank == 0):
        raise error
    raise EndsWithPrimary(error.exit_code, error.screen())


def _write_tokens(folders: list[Path], world: World) -> list[tuple[str, str]]:
    """Each folder's path on the primary, and the primary's file in it; empty where there is no room. Collective."""
    tokens: list[tuple[str, str]] = []
    failure: UserError | None = None
    if world.is_primary:
        for folder in folders:
            try:
                tokens.append((str(folder.absolute()), write_token(folder)))
            except OSError as error:
                failure = UserError(
                    "the run folder cannot be written", where=str(folder), got=error.strerror, hint="--output-dir PATH"
                )
                break
    screen = failure.screen() if failure else ""
    answer = json.loads(broadcast_text(json.dumps({"tokens": tokens, "screen": screen}), world))
    if failure is not None:
        raise failure
    if answer["screen"]:
        raise EndsWithPrimary(EXIT_USER, answer["screen"])
    return [(path, name) for path, name in answer["tokens"]]


def _find_missing(folders: list[Path], tokens: list[tuple[str, str]], place: RunPlace) -> dict[str, str]:
    """A folder that this rank does not see: the primary's path of it, and the reason."""
    for folder, (path, name) in zip(folders, tokens, strict=True):
        if name and (trouble := find_token(folder, name)):
            own = str(folder.absolute())
            return {path: trouble if own == path else f"{trouble}, {own}"}
    source = place.resume_from
    if source is not None and not has_checkpoint(source):
        return {str(source.absolute()): "no checkpoint"}
    return {}
