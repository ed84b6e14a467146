"""What a person sees while a run is under way. Only the primary has a speaking one.

On a terminal: a live bar with the numbers of the moment, and one row per epoch. Elsewhere: the same
numbers as plain lines with a fixed order of fields, for grep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Prints the story of a run."""

    def __init__(self, *, is_speaking: bool, metric_lines: bool = False) -> None:
        self._out = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True, quiet=not is_speaking)
        self._is_live = is_speaking and self._out.is_terminal
        self._metric_lines = metric_lines
        self._progress: Progress | None = None
        self._task: Any = None
        self._first_step = 0
        self._started = time.perf_counter()

    def note(self, text: str, *, style: str | None = None) -> None:
        self._out.print(text, style=style, markup=False)

    def start(self, *, first_step: int, total_steps: int) -> None:
        """The first step is about to be taken."""
        self._first_step = first_step
        self._started = time.perf_counter()
        if self._is_live:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._out, transient=True)
            self._task = self._progress.add_task("starting", total=total_steps, completed=first_step)
            self._progress.start()

    def remaining_s(self, step: int, total_steps: int) -> float:
        """Seconds to go at the pace so far."""
        done = max(step - self._first_step, 1)
        return (time.perf_counter() - self._started) / done * (total_steps - step)

    def step(self, step: int, total_steps: int, values: Mapping[str, float]) -> None:
        memory = f"mem {values['memory_mb']:,.0f}/{values['memory_peak_mb']:,.0f} MB"
        line = (
            f"step {step}/{total_steps}  loss {values['loss']:.4f}  acc {values['accuracy']:.1%}"
            f"  lr {values['lr']:.4g}  {values['throughput']:,.0f} img/s  wait {values['data_wait']:.0%}"
            f"  {memory}  grad {values['grad_norm']:.3g}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=line)
        else:
            self.note(f"{line}  eta {format_seconds(self.remaining_s(step, total_steps))}")

    def epoch(self, epoch: int, epochs: int, train: Mapping[str, float], val: Mapping[str, float], best: bool) -> None:
        number = f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
        self.note(
            f"{number}  train loss {train['loss']:.4f} acc {train['accuracy']:.2%}"
            f"  |  val loss {val['loss']:.4f} acc {val['accuracy']:.2%}"
            f"  |  {train['throughput']:,.0f} img/s  {train['seconds']:.1f} s" + ("  *best" if best else ""),
            style="green" if best else None,
        )
        if self._metric_lines:
            self.note(
                f"[METRIC] epoch={epoch} time={train['seconds']:.4f} val_loss={val['loss']:.6f}"
                f" acc={100 * val['accuracy']:.4f} peak_mem={train['memory_peak_mb']:.2f}MB"
            )

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def format_seconds(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
