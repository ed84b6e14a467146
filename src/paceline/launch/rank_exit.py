"""The exit record of a rank: why it ends, as JSON in the folder of the attempt. The supervisor reads it."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import Cause, EndsWithPrimary, PacelineError, text_of
from paceline.launch.causes import cause_of, is_consequence
from paceline.runtime.detect import OWN_LAUNCHER
from paceline.runtime.own_rank import own_rank
from paceline.runtime.pulse import ATTEMPT_DIR

_MOST_TRACEBACK_LINES = 30


@dataclass(frozen=True)
class RankExit:
    exit_code: int
    cause: Cause
    is_consequence: bool  # another rank has failed before
    kind: str  # the exception's class
    what: str
    screen: str
    error: dict[str, Any] | None  # the same in parts, of an error of ours
    traceback: str
    time_s: float  # monotonic: of several, the first counts


def write_rank_exit(screen: str, code: int, error: BaseException) -> bool:
    """Tell the supervisor why this rank ends; False if there is none."""
    folder = os.environ.get(ATTEMPT_DIR)
    if folder is None or OWN_LAUNCHER not in os.environ:
        return False
    lines = "".join(traceback.format_exception(error)).splitlines()[-_MOST_TRACEBACK_LINES:]
    record = RankExit(
        exit_code=code,
        cause=cause_of(error),
        is_consequence=is_consequence(error),
        kind=type(error).__name__,
        what=_what(error, screen),
        screen=screen,
        error=error.to_json() if isinstance(error, PacelineError) else None,
        traceback="\n".join(lines),
        time_s=time.monotonic(),
    )
    path = _path(Path(folder), own_rank() or 0)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(record)))
    draft.rename(path)
    return True


def _what(error: BaseException, screen: str) -> str:
    return screen if isinstance(error, EndsWithPrimary) else text_of(error) or screen


def _path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"rank-{rank}.exit"


def read_rank_exit(attempt_dir: Path, rank: int) -> RankExit | None:
    try:
        content = json.loads(_path(attempt_dir, rank).read_text())
        return RankExit(**{**content, "cause": Cause(content["cause"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
