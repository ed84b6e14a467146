"""Before the first step of a run on several nodes: every node sees the run folder, its checkpoints and their source."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.errors import EXIT_USER, EndsWithPrimary, UserError
from paceline.parallel.collectives import broadcast_text, gather_texts
from paceline.runs.folder import RunFolder, has_checkpoint
from paceline.runs.place import RunPlace
from paceline.runs.shared_token import NODE_LOCAL, find_token, not_shared, remove_token, write_token
from paceline.runtime.detect import RankEnvironment, World


def require_shared_folder(place: RunPlace, world: World, environment: RankEnvironment) -> None:
    """Collective. Raises UserError on the primary and on each node that misses a folder; the other ranks end with them.

    Without this check the nodes would train for an epoch, and then one would not find what another has saved.
    """
    if environment.is_on_one_node or world.world_size == 1:
        return
    # As this rank names them: a relative path leads elsewhere from another working folder.
    folders = [place.folder, RunFolder(place.folder).checkpoints]  # checkpoints may be on another disk
    tokens = _write_tokens(folders, world)
    try:
        found = {} if os.environ.get(NODE_LOCAL) else _look(folders, tokens, place)
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


def _look(folders: list[Path], tokens: list[tuple[str, str]], place: RunPlace) -> dict[str, str]:
    """What this rank does not see, by the primary's path of it."""
    for folder, (path, name) in zip(folders, tokens, strict=True):
        if name and (trouble := find_token(folder, name)):
            own = str(folder.absolute())
            return {path: trouble if own == path else f"{trouble}, {own}"}
    source = place.resume_from
    if source is not None and not has_checkpoint(source):
        return {str(source.absolute()): "no checkpoint"}
    return {}
