"""torchrun's error file: the message of a rank that fails, for the summary that torchrun prints last.

Without it, torchrun prints its own traceback and a summary that does not say why the rank failed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.runtime.detect import OWN_LAUNCHER

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# torchrun takes the failure with the earliest whole second for the root cause. A rank that fails because another rank
# has failed may write its file within the same second.
_CONSEQUENCE_DELAY_S = 2


def leave_error_file(
    screen: str, code: int, *, is_consequence: bool = False, environment: Mapping[str, str] = os.environ
) -> bool:
    """Write the message for torchrun's summary. False without torchrun, and if the file cannot be written.

    is_consequence: another rank's failure or a signal ended this rank.
    """
    path = _path(environment)
    if path is None:
        return False
    extra = {"py_callstack": screen, "timestamp": str(int(time.time()) + is_consequence * _CONSEQUENCE_DELAY_S)}
    content = {"message": {"message": screen, "extraInfo": extra, "errorCode": code}}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        # By rename: torchrun itself fails if it reads an incomplete file.
        draft.write_text(json.dumps(content))
        draft.rename(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        return False
    return True


def is_summary_expected(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun prints the error file of this rank, so the rank does not have to print the message itself.

    torchrun prints it only after the last attempt. If each rank has its own output file, the rank prints it there too.
    """
    path = _path(environment)
    if path is None or (path.parent / "stderr.log").exists():
        return False
    attempts = [environment.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return all(text.isdecimal() for text in attempts) and int(attempts[0]) >= int(attempts[1])


def _path(environment: Mapping[str, str]) -> Path | None:
    name = environment.get(_ERROR_FILE, "")
    return Path(name) if name and OWN_LAUNCHER not in environment else None
