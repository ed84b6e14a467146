"""Injects the faults of `--inject` at their rank, step and phase.

The tests use the same code. A fault is written to a file in the run folder before it happens. This proves that it
happened, and prevents that the next attempt injects it again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoints.format import MANIFEST, step_folders
from paceline.data.loader import Batch
from paceline.errors import EXIT_INTERNAL, PacelineError, UserError
from paceline.runs.folder import flush
from paceline.settings.faults import EVERY_RANK, FLIP, GPU_HANG, Fault, read_ledger
from paceline.settings.small_files import write_plain

_DEFAULT_PHASE = "forward"
_BATCH_FAULTS = ("nan", "spike", "inf-gradient", "oom")
_SAVE_FAULTS = ("full-disk", "slow-disk")
_ENDLESS_S = 10**6
_ENDLESS_CYCLES = 2**62
_DEFAULT_BIT = 20  # of 32
_MOST_NAMES = 12
_leaked: list[bytearray] = []


class Faults:
    """The faults of this rank, and how often each has happened."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, attempt: int, ledger: Path, checkpoints: Path) -> None:
        self._faults = [fault for fault in faults if fault.rank in (rank, EVERY_RANK)]
        self._rank = rank
        self._attempt = attempt
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._done = {fault.number: 0 for fault in self._faults}
        self._flipped_at: dict[int, int] = {}  # by the number of the fault: its first step in this attempt
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        if any(fault.kind == GPU_HANG for fault in self._faults) and not torch.cuda.is_available():
            raise UserError(f"the fault {GPU_HANG} needs a GPU", where="flag --inject", hint="hang, on a CPU")
        for row in read_ledger(ledger):
            if row["rank"] == rank and row["fault"] in self._done:
                self._done[row["fault"]] += 1

    def __bool__(self) -> bool:
        return bool(self._faults)

    def at_phase(self, phase: str, step: int) -> None:
        """Called when the rank enters a phase of this step."""
        for fault in self._faults:
            if fault.kind in (*_BATCH_FAULTS, *_SAVE_FAULTS, FLIP) or phase != (fault.phase or _DEFAULT_PHASE):
                continue
            if fault.kind == "slow":
                self._sleep_if_slow(fault, step)
            elif step == fault.step and self._begin(fault):
                self._carry_out(fault)

    def change_batch(self, batch: Batch, model: nn.Module, step: int) -> Batch:
        """The batch, changed by the faults of this step."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for fault in self._faults:
            if fault.kind not in _BATCH_FAULTS or fault.kind == "oom" or step != fault.step or not self._begin(fault):
                continue
            if fault.kind == "inf-gradient":
                self._hook = _spoil_gradients(model)
                continue
            inputs = batch.inputs.clone()
            if fault.kind == "nan":
                inputs[0] = float("nan")
            else:
                inputs *= 1000.0
            batch = dataclasses.replace(batch, inputs=inputs)
        return batch

    def check_tensors(self, names: list[str]) -> None:
        """Before the first step: refuse a flip in a tensor that is not trained."""
        for fault in self._faults:
            if fault.kind == FLIP and fault.tensor and fault.tensor not in names:
                raise UserError(
                    f"there is no trained parameter {fault.tensor!r} to flip a bit in",
                    where="flag --inject",
                    allowed=", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else ""),
                )

    def flip_gradients(self, model: nn.Module, step: int, *, is_audit: bool) -> None:
        """Called after the backward pass of a lane. A transient flip (of one step) does not hit an audit."""
        for fault in self._faults:
            steps = fault.values.get("steps", 1)
            if fault.kind != FLIP or not fault.step <= step < fault.step + steps or (is_audit and steps <= 1):
                continue
            if fault.number not in self._flipped_at:
                if steps > 1:
                    self._note(fault)  # a bad chip stays bad: it is noted once per attempt and not counted
                elif not self._begin(fault):
                    continue
                self._flipped_at[fault.number] = step
            if steps > 1 or self._flipped_at[fault.number] == step:
                _flip_gradient(model, fault.tensor, int(fault.values.get("bit", _DEFAULT_BIT)))

    def has_lasting_flip(self, step: int) -> bool:
        """Whether this rank simulates a processor that is wrong in every computation of this step."""
        flips = [fault for fault in self._faults if fault.kind == FLIP and fault.values.get("steps", 1) > 1]
        return any(fault.step <= step < fault.step + fault.values["steps"] for fault in flips)

    def check_memory(self, microbatch: int, step: int) -> None:
        """Raise OutOfMemoryError if a microbatch of this size should not fit."""
        for fault in self._faults:
            if fault.kind == "oom" and step >= fault.step and microbatch > fault.values.get("above", 0):
                self._note(fault)
                raise torch.OutOfMemoryError(f"out of memory: a microbatch of {microbatch} samples does not fit")

    def before_write(self, step: int) -> None:
        """Called before a save of this step writes."""
        for fault in self._faults:
            if fault.kind not in _SAVE_FAULTS or step < fault.step or not self._begin(fault):
                continue
            if fault.kind == "slow-disk":
                time.sleep(fault.values.get("seconds", 3.0))
            else:
                raise OSError(28, "No space left on device")

    def _begin(self, fault: Fault) -> bool:
        """Whether the fault should happen now. It is recorded before it happens."""
        if self._done[fault.number] >= fault.times:
            return False
        self._note(fault)
        return True

    def _note(self, fault: Fault) -> None:
        self._done[fault.number] += 1
        what = {"fault": fault.number, "kind": fault.kind, "what": str(fault)}
        row = {**what, "rank": self._rank, "attempt": self._attempt}
        write_plain(self._ledger, (json.dumps({**row, "time": time.time()}) + "\n").encode(), appends=True)
        flush(self._ledger)

    def _sleep_if_slow(self, fault: Fault, step: int) -> None:
        if fault.step <= step < fault.step + fault.values.get("steps", 1):
            if step == fault.step:
                self._begin(fault)
            time.sleep(fault.values.get("seconds", 0.1))

    def _carry_out(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "hang":
            time.sleep(_ENDLESS_S)
        elif fault.kind == "freeze":
            while True:  # PyDLL holds the interpreter's lock; a signal ends only one sleep
                ctypes.PyDLL(None).sleep(_ENDLESS_S)
        elif fault.kind == GPU_HANG:
            torch.cuda._sleep(_ENDLESS_CYCLES)  # queued: the host waits when it reads the next value
        elif fault.kind == "raise":
            raise RuntimeError(f"injected: {fault}")
        elif fault.kind == "exit":
            os._exit(int(fault.values.get("code", EXIT_INTERNAL)))
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind == "leak":
            _leak(fault.values.get("megabytes", 10**6))
        elif fault.kind == "corrupt-latest":
            flip_a_bit(self._checkpoints)


def flip_a_bit(checkpoints: Path) -> Path:
    """Damage the newest checkpoint so that only a checksum finds it."""
    if not step_folders(checkpoints):
        raise PacelineError("corrupt-latest: there is no checkpoint yet to damage", where=str(checkpoints))
    newest = step_folders(checkpoints)[0]
    target = max((path for path in newest.iterdir() if path.name != MANIFEST), key=lambda path: path.stat().st_size)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)
    return target


def _spoil_gradients(model: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Make the gradient of the first layer's output infinite."""
    layers = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]

    def spoil(_: nn.Module, __: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))

    return layers[0].register_forward_hook(spoil)


def _flip_gradient(model: nn.Module, name: str, bit: int) -> None:
    """Flip one bit of the first element of a gradient; without a name, of the first gradient."""
    named = [(key, value.grad) for key, value in model.named_parameters() if value.grad is not None]
    gradient = next((value for key, value in named if not name or key == name), None)
    if gradient is not None:  # an unused layer has none
        word = gradient.reshape(-1)[:1].clone().view(torch.int32)
        flipped = (word ^ torch.tensor(1 << bit, device=word.device).to(torch.int32)).view(gradient.dtype)
        gradient[(0,) * gradient.dim()] = flipped[0]


def _leak(megabytes: float) -> None:
    """Allocate resident memory and keep it, slowly enough to be observed."""
    for _ in range(int(megabytes) // 32):
        _leaked.append(bytearray(os.urandom(4096)) * (32 * 2**20 // 4096))
        time.sleep(0.01)
