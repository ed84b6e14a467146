"""The settings that all cells of a study or a sweep share. A recipe file may be edited before the command continues."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoints.identity import SILENT
from paceline.errors import UserError
from paceline.settings.load import load_config
from paceline.settings.schema import flatten

_MOST_LINES = 3


def shared_settings(recipe: str, flags: Sequence[str], decided: Collection[str]) -> dict[str, Any]:
    """What a recipe and flags are resolved to, as in JSON. `decided`: by each cell."""
    values = flatten(load_config(recipe, flags).config)
    kept = {name: value for name, value in values.items() if name not in decided and name not in SILENT}
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]


def require_same_settings(folder: Path, kind: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """UserError if finished cells had other settings than the next ones would have. Older folders do not say."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    if changed:
        raise UserError(
            f"the recipe of this {kind} has changed, and its cells could not be compared",
            where=str(folder),
            got="\n".join(f"{name}: {now[name]!r}; there: {before[name]!r}" for name in changed[:_MOST_LINES]),
            hint="--output-dir PATH for a new one, or put the recipe back to continue",
        )
