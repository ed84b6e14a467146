"""A process that must not be started again says so in a file that the job's script reads.

`srun` ends the other tasks when one has failed, and then returns their signal instead of the exit code that explains
the failure. Without this file the script would take a user's mistake for a task that was killed, and requeue the job.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paceline.launch.policy import FINAL_CODES

FINAL_CODE_FILE = "PACELINE_FINAL_CODE_FILE"  # set by job.sbatch


def note_final_code(code: int) -> None:
    """The first process counts. Does nothing outside of such a job, and for ends after which a retry may help.

    A rank of our supervisor leaves it to the supervisor, which may start the ranks again.
    """
    from paceline.runtime.detect import OWN_LAUNCHER  # here: `paceline submit --help` must not wait for it

    path = os.environ.get(FINAL_CODE_FILE)
    if path and code in FINAL_CODES and OWN_LAUNCHER not in os.environ:
        with suppress(OSError), Path(path).open("x") as file:
            file.write(f"{code}\n")
