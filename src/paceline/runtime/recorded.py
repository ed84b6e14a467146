"""CUDA graphs: work on a GPU, recorded once and then replayed with a single call.

A step of a small model is hundreds of kernels, and launching each takes longer than running it. A CUDA graph runs the
same kernels on the same memory and gives the same bits. It only saves the launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("paceline")
_PLAIN_CALLS = 2  # in the first calls libraries choose kernels and workspace, and optimizers make their state


def is_recording() -> bool:
    """Whether the current stream is being recorded: nothing runs, and the host must not read or write tensors."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Recorded:
    """A function of tensors that never reads their values on the host.

    Its results, and other tensors that it writes, are in the same memory after every call: use them before the next
    call.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        read_host: Callable[[], Any] = lambda: None,
        *,
        plain_calls: int = _PLAIN_CALLS,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`read_host` returns host state that the work may depend on. Work that changes it is not recorded.

        `plain_calls`: how often the work runs before it is recorded. `agree`: whether something is true on all ranks,
        for work with collectives, which all ranks record or none.
        """
        self._work = work
        self._read_host = read_host
        self._plain_calls = plain_calls
        self._agree = agree
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_refused = False
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        self._calls += 1
        if self._graph is None and self._calls > self._plain_calls and not self._is_refused:
            self._record(inputs)
        if self._graph is None:
            return self._work_plainly(*inputs)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs

    @property
    def is_recorded(self) -> bool:
        return self._graph is not None

    def prepare(self, *inputs: Tensor) -> None:
        """Record the graph now, with inputs of the right shape."""
        while self._graph is None and not self._is_refused:
            self(*inputs)

    def forget(self) -> None:
        """Discard the graph. Call this when tensors that the work uses have moved."""
        self._calls, self._graph, self._inputs, self._outputs = 0, None, (), None

    def _work_plainly(self, *inputs: Tensor) -> Any:
        if self._calls != self._plain_calls:
            return self._work(*inputs)
        before = self._read_host()  # compared in the last call before the recording: the first call may compile
        answer = self._work(*inputs)
        self._is_refused = not self._agree(before == self._read_host())
        if self._is_refused:
            _log.info("note: not recorded as a CUDA graph: each step changes random or other state on the host")
        return answer

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(given.clone() for given in inputs)
        torch.cuda.synchronize()
        graph, reason = torch.cuda.CUDAGraph(), ""
        # The default stream cannot be recorded. A rank that exchanges gradients has a stream of its own, on which all
        # of its work runs (runtime/group.py).
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else current
        try:
            # Record only this thread's work: a thread that writes a checkpoint may use the GPU at the same time.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._outputs = self._work(*self._inputs)
        except RuntimeError as error:  # work that reads values on the host; it runs without a graph
            reason = str(error).splitlines()[0]
        torch.cuda.synchronize()
        if not self._agree(not reason):
            self._is_refused = True
            _log.info("note: not recorded as a CUDA graph: %s", reason or "another rank cannot record it")
            return
        self._graph = graph
