"""This process's number among the ranks. Imports nothing: every command asks for it."""

from __future__ import annotations

import os


def own_rank() -> int | None:
    """None in a process that is no rank, such as the supervisor."""
    text = os.environ.get("RANK")
    return int(text) if text and text.isdecimal() else None
