"""Measures exposed communication (time that a rank waits, not overlapped with computation) and exchanged bytes.

Under DDP a rank waits from the moment its own last gradient is ready until the backward pass returns. Under FSDP on
CPUs a rank waits for every exchange. FSDP on GPUs overlaps exchanges in separate streams; this is not measured here.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from paceline.runtime.recorded import is_recording


class Exposed:
    """Exposed communication of this rank since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._waited_s = 0.0
        self._bytes = 0
        self._ready_at: float | torch.cuda.Event | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.is_known = True  # False if waiting cannot be distinguished from computing

    def count(self, size_bytes: int) -> None:
        self._bytes += size_bytes

    def exchanged(self, began: float, size_bytes: int) -> None:
        """An exchange that began at this moment has returned."""
        if self.is_known:  # otherwise it was only launched, and the host's time is not the device's
            self._waited_s += time.perf_counter() - began
        self.count(size_bytes)

    def follow_last_gradient(self, parameter: nn.Parameter) -> None:
        """This parameter's gradient is the last one of a backward pass."""
        parameter.register_post_accumulate_grad_hook(self._mark_ready)

    def backward_is_over(self) -> None:
        """Call when the backward pass has returned: all gradients are reduced, or queued on the device."""
        if isinstance(self._ready_at, float):
            self._waited_s += time.perf_counter() - self._ready_at
        elif self._ready_at is not None:
            self._spans.append((self._ready_at, _record()))
        self._ready_at = None

    def take(self) -> tuple[float, int]:
        """Seconds and bytes since the last call. Call it only after the device has finished this work."""
        seconds = self._waited_s + sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000
        size_bytes = self._bytes
        self._waited_s, self._bytes, self._spans = 0.0, 0, []
        return seconds, size_bytes

    def _mark_ready(self, _: Tensor) -> None:
        if is_recording():
            return  # a replayed event cannot be read
        self._ready_at = _record() if self._is_cuda else time.perf_counter()


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def find_last_gradient(model: nn.Module, run_backward: Any) -> nn.Parameter | None:
    """The parameter whose gradient comes last in a backward pass."""
    order: list[nn.Parameter] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, parameter=parameter: order.append(parameter))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    run_backward()
    for hook in hooks:
        hook.remove()
    return order[-1] if order else None
