"""Limits of this user: open files (`ulimit -n`) and threads (`ulimit -u`). A limit that is too low is an error."""

from __future__ import annotations

import resource

from paceline.errors import UserError

OPEN_FILES_HINT = "ulimit -n 1024 in the shell or the job script; if that is refused, ask the administrator"
THREADS_HINT = (
    "raise ulimit -u, or the limit of processes of the container (docker run --pids-limit, pids.max);\n"
    "or start fewer: --processes, --num-workers, --omp-num-threads"
)
_FEWEST = 40  # seen to be enough for two ranks on one machine; a run of many ranks needs more
_USUAL = 1024


def require_open_files() -> None:
    """Raise the limit to 1024 if the hard limit allows it. Children inherit it. UserError if a run cannot start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _USUAL:
        return
    wanted = _USUAL if hard == resource.RLIM_INFINITY else min(hard, _USUAL)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _FEWEST:
        raise UserError(
            "a process may open too few files here",
            where="the limit of open files (ulimit -n)",
            got=str(wanted),
            allowed=f"{_FEWEST} or more; {_USUAL} is usual",
            hint=OPEN_FILES_HINT,
        )
