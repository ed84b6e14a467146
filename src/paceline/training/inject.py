"""Faults on purpose: what `--inject` asks for, made to happen at its rank, step and phase.

The tests use the same code. Before a fault strikes it is written into the run folder's ledger, which proves
that it did and keeps it from striking again when the same step comes by in the next attempt.
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
from paceline.errors import EXIT_INTERNAL, PacelineError
from paceline.runs.folder import flush
from paceline.settings.faults import EVERY_RANK, Fault, read_ledger
from paceline.settings.small_files import write_plain

_DEFAULT_PHASE = "forward"
_BATCH_FAULTS = ("nan", "spike", "inf-gradient", "oom")
_SAVE_FAULTS = ("full-disk", "slow-disk")
_FOR_EVER_S = 10**6
_leaked: list[bytearray] = []


class Faults:
    """The faults of this rank, and which of them have struck."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, attempt: int, ledger: Path, checkpoints: Path) -> None:
        self._faults = [fault for fault in faults if fault.rank in (rank, EVERY_RANK)]
        self._rank = rank
        self._attempt = attempt
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._struck = {fault.number: 0 for fault in self._faults}
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        for row in read_ledger(ledger):
            if row["rank"] == rank and row["fault"] in self._struck:
                self._struck[row["fault"]] += 1

    def __bool__(self) -> bool:
        return bool(self._faults)

    def at_phase(self, phase: str, step: int) -> None:
        """The rank enters a phase of this step."""
        for fault in self._faults:
            if fault.kind in _BATCH_FAULTS or fault.kind in _SAVE_FAULTS or phase != (fault.phase or _DEFAULT_PHASE):
                continue
            if fault.kind == "slow":
                self._be_slow(fault, step)
            elif step == fault.step and self._strike(fault):
                self._carry_out(fault)

    def touch(self, batch: Batch, model: nn.Module, step: int) -> Batch:
        """The batch as the fault leaves it."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for fault in self._faults:
            if fault.kind not in _BATCH_FAULTS or fault.kind == "oom" or step != fault.step or not self._strike(fault):
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

    def take_memory(self, microbatch: int, step: int) -> None:
        """Raises where a microbatch of this size does not fit."""
        for fault in self._faults:
            if fault.kind == "oom" and step >= fault.step and microbatch > fault.values.get("above", 0):
                self._note(fault)
                raise torch.OutOfMemoryError(f"out of memory: a microbatch of {microbatch} samples does not fit")

    def before_write(self, step: int) -> None:
        """A save of this step begins to write."""
        for fault in self._faults:
            if fault.kind not in _SAVE_FAULTS or step < fault.step or not self._strike(fault):
                continue
            if fault.kind == "slow-disk":
                time.sleep(fault.values.get("seconds", 3.0))
            else:
                raise OSError(28, "No space left on device")

    def _strike(self, fault: Fault) -> bool:
        """Whether it is still to come; written down before it happens."""
        if self._struck[fault.number] >= fault.times:
            return False
        self._note(fault)
        return True

    def _note(self, fault: Fault) -> None:
        self._struck[fault.number] += 1
        what = {"fault": fault.number, "kind": fault.kind, "what": str(fault)}
        row = {**what, "rank": self._rank, "attempt": self._attempt}
        write_plain(self._ledger, (json.dumps({**row, "time": time.time()}) + "\n").encode(), appends=True)
        flush(self._ledger)

    def _be_slow(self, fault: Fault, step: int) -> None:
        if fault.step <= step < fault.step + fault.values.get("steps", 1):
            if step == fault.step:
                self._strike(fault)
            time.sleep(fault.values.get("seconds", 0.1))

    def _carry_out(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "hang":
            time.sleep(_FOR_EVER_S)
        elif fault.kind == "freeze":
            while True:  # PyDLL keeps the interpreter's lock; a signal ends one sleep
                ctypes.PyDLL(None).sleep(_FOR_EVER_S)
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
    """Damage the newest checkpoint so that only its checksum can tell."""
    if not step_folders(checkpoints):
        raise PacelineError("corrupt-latest: there is no checkpoint yet to damage", where=str(checkpoints))
    newest = step_folders(checkpoints)[0]
    victim = max((path for path in newest.iterdir() if path.name != MANIFEST), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    return victim


def _spoil_gradients(model: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """The first layer's output stays what it is; what comes back to it is infinite."""
    layers = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]

    def spoil(_: nn.Module, __: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))

    return layers[0].register_forward_hook(spoil)


def _leak(megabytes: float) -> None:
    """Touched, so that it is resident, and never given back. Slowly enough to be seen."""
    for _ in range(int(megabytes) // 32):
        _leaked.append(bytearray(os.urandom(4096)) * (32 * 2**20 // 4096))
        time.sleep(0.01)
