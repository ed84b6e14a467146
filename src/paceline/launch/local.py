"""Ranks on this machine, started and watched by torch's elastic agent.

The agent picks a free port, gives each rank its environment, and ends the others when one fails. Each
rank is this same program, so a rank under `paceline train` and one under `torchrun` run one code path.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from paceline.errors import EXIT_FINISHED, EXIT_INTERNAL, PacelineError
from paceline.world.detect import OWN_LAUNCHER

_SIGNAL_EXIT = 128  # a shell's exit code for "ended by signal N" is this plus N
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where the agent looks for a rank's last words


def launch_ranks(arguments: list[str], *, processes: int, threads: int) -> int:
    """Run `paceline <arguments>` as this many ranks; returns the exit code for the shell."""
    # Imported here: the verbs that start nothing should not wait for torch.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # what it would say, we say in our own words
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[OWN_LAUNCHER] = "paceline"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="paceline",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: whichever is free
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "paceline", *arguments)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        message = _last_words(Path(first.error_file))
        print(
            message or f"error: rank {first.local_rank} ended with exit code {first.exitcode}",
            file=sys.stderr,
        )
        return first.exitcode if first.exitcode > 0 else EXIT_INTERNAL
    except SignalException as stopped:
        print("\ninterrupted; every rank was stopped", file=sys.stderr)
        return _SIGNAL_EXIT + int(stopped.sigval)
    return EXIT_FINISHED


def leave_last_words(error: PacelineError | str) -> bool:
    """Tell the agent why this rank fails; False when no agent of ours is listening."""
    path = os.environ.get(_ERROR_FILE)
    if path is None or OWN_LAUNCHER not in os.environ:
        return False
    text = error.screen() if isinstance(error, PacelineError) else error
    words = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(path).write_text(json.dumps({"message": words}))
    return True


def _last_words(path: Path) -> str | None:
    try:
        text: str = json.loads(path.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return text
