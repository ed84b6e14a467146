"""Checkpoints that were changed by someone who knows the format: every checksum is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoints.format import MANIFEST, STATE, FileSeal, Manifest, add_checksum, read_manifest


def rewrite_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json, and the manifest with it."""
    values = json.loads((checkpoint / STATE).read_text())
    change(values)
    (checkpoint / STATE).write_text(json.dumps(values))
    reseal(checkpoint)


def reseal(checkpoint: Path) -> None:
    """Make the manifest fit the files."""
    manifest = read_manifest(checkpoint)
    contents = {name: (checkpoint / name).read_bytes() for name in manifest.files}
    files = {name: FileSeal(len(raw), add_checksum(raw)) for name, raw in contents.items()}
    (checkpoint / MANIFEST).write_bytes(Manifest(files, manifest.about).to_bytes())
