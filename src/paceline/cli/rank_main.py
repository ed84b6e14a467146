"""What a rank of our own supervisor runs: the same command again. The environment says which rank it is."""

from __future__ import annotations

import os

from paceline.cli.main import main
from paceline.errors import EXIT_FINISHED
from paceline.metrics.safe_output import finish_console


def rank_main(arguments: list[str]) -> None:
    code = main(arguments)
    finish_console()
    if code != EXIT_FINISHED:
        os._exit(code)  # without waiting for threads that may wait for a lost peer
