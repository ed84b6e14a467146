"""`paceline.train(on_epoch=...)`: calls a function of the caller after each epoch, in the thread of the caller."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal

from paceline.errors import UserError
from paceline.launch.child import Child
from paceline.library.table import SHOWN_ROWS, Table
from paceline.runtime.caller import EpochReports, ask_for_results

_EVERY_RUN = ("loss", "accuracy", "throughput")  # figures of a validation that are not the user's metrics


class _Stop(Enum):
    STOP = "paceline.STOP"

    def __repr__(self) -> str:
        return self.value


STOP: Final = _Stop.STOP


@dataclass(frozen=True)
class Epoch:
    """The figures of one epoch, as `on_epoch` gets them."""

    number: int  # from 1
    epochs: int  # of the whole run
    step: int
    train_loss: float
    train_accuracy: float | None  # None for tasks without an accuracy
    val_loss: float | None  # None without a validation set
    val_accuracy: float | None
    is_best: bool  # the best validation so far
    samples_per_s: float  # in training
    seconds: float  # of training, without validation
    metrics: dict[str, float] = field(default_factory=dict)  # all others, of the validation set

    @classmethod
    def from_report(cls, row: Mapping[str, Any]) -> Epoch:
        train, val = row["train"], row["val"] or {}
        return cls(
            number=row["epoch"],
            epochs=row["epochs"],
            step=row["step"],
            train_loss=train["loss"],
            train_accuracy=train.get("accuracy"),
            val_loss=val.get("loss"),
            val_accuracy=val.get("accuracy"),
            is_best=row["is_best"],
            samples_per_s=train["throughput"],
            seconds=train["seconds"],
            metrics={name: value for name, value in val.items() if name not in _EVERY_RUN},
        )


OnEpoch = Callable[[Epoch], Literal[_Stop.STOP] | None]


def check_on_epoch(function: object) -> None:
    if function is not None and not callable(function):
        raise UserError(
            "on_epoch is no function",
            where="paceline.train(on_epoch=...)",
            got=repr(function),
            allowed="a function of one argument, a paceline.Epoch",
        )


class EpochWatch:
    """Calls functions with each new epoch of a run. An epoch that is trained again after a restart is not repeated."""

    def __init__(self, folder: Path, functions: Sequence[OnEpoch]) -> None:
        self.folder = folder
        self._functions = functions
        self._reports = EpochReports(folder)
        self._last_epoch = 0
        self.error: BaseException | None = None  # of a function; it has ended the run
        self.has_asked_for_end = False

    def look(self, child: Child) -> None:
        """Must be called by the thread of the caller. Ctrl-C in a function is not caught."""
        for row in self._reports.read_new():
            if self.error is not None or self.has_asked_for_end:
                return
            if row["epoch"] <= self._last_epoch:
                continue
            self._last_epoch = row["epoch"]
            try:
                is_end = self._call(Epoch.from_report(row))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.error = error
                child.send_signal(signal.SIGTERM)  # saves, without a test
            else:
                if is_end:
                    self.has_asked_for_end = True
                    ask_for_results(self.folder)
                    child.send_signal(signal.SIGTERM)

    def _call(self, epoch: Epoch) -> bool:
        answers = [function(epoch) for function in self._functions]
        for answer in answers:
            if answer is not None and answer is not STOP:
                raise UserError(
                    "on_epoch returns something else than paceline.STOP",
                    where=f"on_epoch, after epoch {epoch.number}",
                    got=repr(answer),
                    allowed="paceline.STOP to end the run, or nothing to continue",
                )
        return STOP in answers


# A table in a notebook that gets a row per epoch while a run trains.


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
