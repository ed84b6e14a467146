"""A table in a notebook that gets a row per epoch while a run trains."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from paceline.library.epochs import Epoch
from paceline.library.table import SHOWN_ROWS, Table


def open_live_table() -> LiveTable | None:
    """None outside of notebooks: a terminal cannot replace what it has printed, and a script shows no HTML."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    terminal = sys.modules.get("IPython.terminal.interactiveshell")
    if shell is None or (terminal is not None and isinstance(shell, terminal.TerminalInteractiveShell)):
        return None
    return LiveTable()


class LiveTable:
    """Shows the last epochs. A display that fails ends no run."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._handle: Any = None

    def show(self, epoch: Epoch) -> None:
        self._rows.append(_row(epoch))
        table = Table(self._rows[-SHOWN_ROWS:])
        with suppress(Exception):
            if self._handle is None:
                from IPython.display import display

                self._handle = display(table, display_id=True)
            else:
                self._handle.update(table)


def _row(epoch: Epoch) -> dict[str, Any]:
    return {
        "epoch": f"{epoch.number}/{epoch.epochs}",
        "train loss": epoch.train_loss,
        "train accuracy": _percent(epoch.train_accuracy),
        "val loss": epoch.val_loss,
        "val accuracy": _percent(epoch.val_accuracy),
        **epoch.metrics,
        "samples/s": epoch.samples_per_s,
        "seconds": epoch.seconds,
        "": "best" if epoch.is_best else "",
    }


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"
