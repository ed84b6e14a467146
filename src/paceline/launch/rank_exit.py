"""A rank's last words: why it ends, left where its supervisor looks for them."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EndsWithPrimary, PacelineError
from paceline.runtime.detect import OWN_LAUNCHER
from paceline.runtime.own_rank import own_rank
from paceline.runtime.pulse import ATTEMPT_DIR

_MOST_TRACEBACK_LINES = 30


@dataclass(frozen=True)
class RankExit:
    exit_code: int
    kind: str  # the exception's class
    what: str
    screen: str
    error: dict[str, Any] | None  # the same in parts, of an error of ours
    traceback: str
    said_at_s: float  # monotonic, so that the first of several can be told


def write_rank_exit(screen: str, code: int, error: BaseException | None = None) -> bool:
    """Tell the supervisor why this rank ends; False when none is listening."""
    folder = os.environ.get(ATTEMPT_DIR)
    if folder is None or OWN_LAUNCHER not in os.environ:
        return False
    lines: list[str] = []
    if error is not None:
        lines = "".join(traceback.format_exception(error)).splitlines()[-_MOST_TRACEBACK_LINES:]
    words = RankExit(
        exit_code=code,
        kind=type(error).__name__ if error is not None else "",
        what=_what(error, screen),
        screen=screen,
        error=error.to_json() if isinstance(error, PacelineError) else None,
        traceback="\n".join(lines),
        said_at_s=time.monotonic(),
    )
    path = words_path(Path(folder), own_rank() or 0)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(words)))
    draft.rename(path)
    return True


def _what(error: BaseException | None, screen: str) -> str:
    if isinstance(error, PacelineError):
        return error.what
    return screen if isinstance(error, EndsWithPrimary) else str(error or screen)


def words_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"rank-{rank}.words"


def read_last_words(attempt_dir: Path, rank: int) -> RankExit | None:
    try:
        return RankExit(**json.loads(words_path(attempt_dir, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None
