"""Writes the exit code of a failure that would repeat into a file that the job's script reads.

`srun` ends the other tasks when one has failed, and then returns their signal instead of the first exit code. Without
this file the script would requeue a job that has a user's mistake.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paceline.launch.policy import FINAL_CODES

FINAL_CODE_FILE = "PACELINE_FINAL_CODE_FILE"  # set by job.sbatch


def note_final_code(code: int) -> None:
    """Write the code, if no process has. Does nothing outside of such a job, and if a retry may help.

    A rank of our supervisor writes nothing: the supervisor may restart it.
    """
    from paceline.runtime.detect import OWN_LAUNCHER  # here: `paceline submit --help` must not wait for it

    path = os.environ.get(FINAL_CODE_FILE)
    if path and code in FINAL_CODES and OWN_LAUNCHER not in os.environ:
        with suppress(OSError), Path(path).open("x") as file:
            file.write(f"{code}\n")
