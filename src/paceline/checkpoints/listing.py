"""The checkpoints of a run as a table shows them. Reads only. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.format import DamagedCheckpoint, Manifest, read_manifest, step_folders, verify
from paceline.checkpoints.store import inspect_checkpoint
from paceline.runs.patience import UnreadableNow


@dataclass(frozen=True)
class Listed:
    """A checkpoint as a table shows it."""

    path: Path
    manifest: Manifest | None
    state: dict[str, Any]
    damage: DamagedCheckpoint | None
    unreadable: UnreadableNow | None = None


def list_checkpoints(folder: Path, *, thorough: bool) -> list[Listed]:
    """Every checkpoint, oldest first, and what is wrong with it: sizes and manifests, or every bit."""
    listed = []
    for path in reversed(step_folders(folder)):
        manifest, state, damage, unreadable = None, {}, None, None
        try:
            manifest = read_manifest(path)
            state = inspect_checkpoint(path).state
            if thorough:
                verify(path)
        except DamagedCheckpoint as found:
            damage = found
        except UnreadableNow as found:
            unreadable = found
        listed.append(Listed(path, manifest, state, damage, unreadable))
    return listed
