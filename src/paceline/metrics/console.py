"""The console output of a run. Only the primary rank prints.

On a terminal: a table with one row per epoch, and below it a live line with the current numbers. Elsewhere: the same
numbers as plain lines with a fixed order of fields, for grep. Under --json, rows go to standard output as JSON and
messages to standard error. Under --quiet, only warnings and the result are printed. Brief output has no step lines,
and with many epochs only every second, third, ... epoch has a line.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.metrics.screen import (
    BRIEF,
    NO_FIGURES,
    LiveLine,
    can_show,
    fit_to,
    is_live,
    message_stream,
    output_mode,
    paint,
    width_of,
    write_line,
)
from paceline.runs.epoch_clock import EpochClock
from paceline.runtime.caller import report_epoch

_HEADING = ["  epoch", "train loss", "    acc", "val loss", "    acc", "    img/s", "   time"]
_WIDEST_BAR, _NARROWEST_BAR = 30, 8
_MOST_BRIEF_EPOCHS = 10


@dataclass(frozen=True)
class Field:
    """A field of the live line."""

    long: str
    short: str
    weight: int  # if the line is too long, the field with the lowest weight is removed first


class Console:
    """Prints the progress of a run."""

    def __init__(
        self,
        *,
        is_enabled: bool,
        metric_lines: bool = False,
        clock: EpochClock | None = None,
        epochs: int = 0,
        shown_metrics: tuple[str, ...] = (),
    ) -> None:
        self._mode = output_mode()
        self._has_rows = is_enabled and self._mode == "json"
        self._is_primary = is_enabled
        self._is_enabled = is_enabled and self._mode != "quiet"
        self._metric_lines = metric_lines
        self.clock = clock
        self._epochs = epochs
        self._shown_metrics = shown_metrics  # of a validation, beside loss and accuracy
        self._line: LiveLine | None = None
        self._first_step = self._step = 0
        self._total_steps = 0
        self._values: Mapping[str, float] = {}
        self._started = self._updated_s = time.perf_counter()

    @property
    def _is_live(self) -> bool:
        """Checked each time: the terminal may close during the run."""
        return self._is_enabled and self._mode not in (BRIEF, NO_FIGURES) and is_live(message_stream())

    def note(self, text: str, *, style: str | None = None) -> None:
        if self._is_enabled:
            out = message_stream()
            write_line(paint(fit_to(out, text), style, out), out)

    def start(self, *, first_step: int, total_steps: int) -> None:
        """Called before the first step."""
        self._first_step = self._step = first_step
        self._total_steps = total_steps
        self._started = self._updated_s = time.perf_counter()
        if self._is_live:
            self.note("")
            self.note(_row(_HEADING, "", width_of(message_stream()) - 1), style="dim")
            self._line = LiveLine(message_stream())
            self._line.start(self._compose)

    def remaining_s(self, step: int, total_steps: int) -> float:
        """Estimated seconds to the end, at the average speed so far."""
        done = max(step - self._first_step, 1)
        return (time.perf_counter() - self._started) / done * (total_steps - step)

    def step(self, step: int, total_steps: int, values: Mapping[str, float]) -> None:
        self._step, self._values, self._updated_s = step, values, time.perf_counter()
        if self._line is not None and self._is_live:
            self._line.draw()
            return
        self.stop()
        if self._mode in (BRIEF, NO_FIGURES):
            return
        epoch = f"  epoch {self._epoch_of(step)}/{self._epochs}" if self.clock else ""
        self.note(
            f"step {step}/{total_steps}{epoch}  loss {values['loss']:.4f}{_accuracy(values, '  acc ', 1)}"
            f"  lr {values['lr']:.4g}  {values['throughput']:,.0f} img/s  wait {values['data_wait']:.0%}"
            f"  mem {values['memory_mb']:,.0f}/{values['memory_peak_mb']:,.0f} MB  grad {values['grad_norm']:.3g}"
            f"  eta {format_seconds(self.remaining_s(step, total_steps))}"
        )

    def epoch(
        self, epoch: int, step: int, train: Mapping[str, float], val: Mapping[str, float] | None, best: bool
    ) -> None:
        """Print a row of the table. There may be no validation set."""
        epochs = self._epochs
        figures = {"train": dict(train), "val": dict(val) if val else None, "is_best": best}
        row = {"kind": "epoch", "epoch": epoch, "epochs": epochs, "step": step, **figures}
        if self._is_primary:
            report_epoch(row)
        if self._has_rows:
            print(json.dumps(row), flush=True)
        if self._is_live:
            cells = [
                f"{epoch}/{epochs}",
                *(f"{train['loss']:.4f}", _accuracy(train) or "-"),
                *((f"{val['loss']:.4f}", _accuracy(val) or "-") if val else ("-", "-")),
                *(f"{train['throughput']:,.0f}", format_seconds(train["seconds"])),
            ]
            mark = ("★" if can_show("★", message_stream()) else "*") + " best" if best else ""
            self.note(_row(cells, mark, width_of(message_stream()) - 1), style="green" if best else None)
        elif self._mode != NO_FIGURES and (self._mode != BRIEF or has_brief_line(epoch, epochs)):
            self.note(
                f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
                f"  train loss {train['loss']:.4f}{_accuracy(train, ' acc ')}"
                + (f"  |  val loss {val['loss']:.4f}{_accuracy(val, ' acc ')}{self._chosen(val)}" if val else "")
                + f"  |  {train['throughput']:,.0f} img/s  {train['seconds']:.1f} s"
                + ("  *best" if best else "")
            )
        if self._metric_lines:
            loss, accuracy = (val["loss"], val.get("accuracy", math.nan)) if val else (math.nan, math.nan)
            # Scripts match this form: in decimal notation, memory in whole MB.
            self.note(
                f"[METRIC] epoch={epoch} time={train['seconds']:.4f} val_loss={loss:.6f}"
                f" acc={100 * accuracy:.4f} peak_mem={train['memory_peak_mb']:.0f}MB"
            )

    def _chosen(self, row: Mapping[str, float]) -> str:
        """The values of the user's own metrics, and of the one that selects the best checkpoint."""
        names = [name for name in self._shown_metrics if name in row and name not in ("loss", "accuracy")]
        return "".join(f" {name} {row[name]:.4f}" for name in names)

    def stop(self) -> None:
        if self._line is not None:
            self._line.stop()
            self._line = None

    # --- The live line

    def _epoch_of(self, step: int) -> int:
        """The epoch of a step. The last step of an epoch still belongs to it."""
        return self.clock.locate(max(step - 1, 0))[0] + 1 if self.clock else 0

    def _compose(self, width: int) -> str:
        step, total, values = self._step, self._total_steps, self._values
        fields = [Field(f"step {step}/{total}", f"step {step}/{total}", 9)]
        if self.clock:
            epoch = f"epoch {self._epoch_of(step)}/{self._epochs}"
            fields.insert(0, Field(epoch, epoch, 5))
        if not values:
            waited = format_seconds(time.perf_counter() - self._started)
            return fit([*fields, Field(f"first steps, {waited}", waited, 8)], width)
        left_s = max(self.remaining_s(step, total) - (time.perf_counter() - self._updated_s), 0)
        eta = f"eta {format_seconds(left_s)}"
        wait = f"data wait {values['data_wait']:.0%}"
        fields += [
            Field(f"loss {values['loss']:.4f}", f"loss {values['loss']:.3f}", 8),
            Field(_accuracy(values, "acc ", 1), _accuracy(values, "acc ", 1), 6),
            Field(f"{values['throughput']:,.0f} img/s", f"{values['throughput']:,.0f} img/s", 4),
            Field(eta, eta, 7),
            Field(f"mem {format_mb(values['memory_mb'])}", format_mb(values["memory_mb"]), 3),
            Field(f"lr {values['lr']:.4g}", "", 2),
            Field(wait if values["data_wait"] >= 0.05 else "", "", 1),
        ]
        return self._with_bar(fit(fields, width), width, step / max(total, 1))

    def _with_bar(self, text: str, width: int, share: float) -> str:
        """Fill the remaining width with a progress bar."""
        room = min(width - len(text) - 2, _WIDEST_BAR)
        if room < _NARROWEST_BAR:
            return text
        done = round(room * share)
        stream = message_stream()
        full, empty = ("━", "─") if can_show("━─", stream) else ("=", "-")
        return f"{text}  {paint(full * done, 'green', stream)}{paint(empty * (room - done), 'dim', stream)}"


def is_step_line(line: str) -> bool:
    """Whether `Console.step` has printed this line, as its first words show."""
    return re.match(r"step \d+/\d+ ", line) is not None


def has_brief_line(epoch: int, epochs: int) -> bool:
    """Whether an epoch has a line in brief output: each of ten epochs, every second of twenty, and the last."""
    return epoch % math.ceil(epochs / _MOST_BRIEF_EPOCHS) == 0 or epoch == epochs


def _accuracy(row: Mapping[str, float], name: str = "", digits: int = 2) -> str:
    """As text after a name. Empty for a regression, which has none."""
    return f"{name}{row['accuracy']:.{digits}%}" if "accuracy" in row else ""


def fit(fields: list[Field], width: int) -> str:
    """Join the fields: in long form, in short form, or without those of the lowest weight."""
    for names in ([field.long for field in fields], [field.short for field in fields]):
        text = "  ".join(name for name in names if name)
        if len(text) <= width:
            return text
    if len(fields) == 1:
        return text[: max(width, 0)]
    lightest = min(fields, key=lambda field: field.weight)
    return fit([field for field in fields if field is not lightest], width)


def _row(cells: list[str], mark: str, width: int) -> str:
    """A row of the table. In a narrow window the last columns are left out, but not the mark."""
    padded = [cell.rjust(len(heading)) for cell, heading in zip(cells, _HEADING, strict=True)]
    while len(padded) > 1 and len("  ".join([*padded, mark])) > width:
        padded.pop()
    return "  ".join([*padded, mark]).rstrip()


def format_mb(megabytes: float) -> str:
    return f"{megabytes:,.0f} MB" if megabytes < 10_000 else f"{megabytes / 1024:,.1f} GB"


def format_seconds(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
