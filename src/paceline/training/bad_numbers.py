"""Losses and gradients that are NaN, infinite or much too large: found before the update, on all ranks at once.

The report of a step is the same on every rank, so all ranks decide the same without a collective. Only after a bad step
do they search for the first bad tensor and exchange what they found.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints.payload import Piece, local_box, write_pieces
from paceline.data.loader import Batch
from paceline.errors import NonFiniteError
from paceline.parallel.apply import autocast
from paceline.parallel.collectives import gather_texts
from paceline.settings.small_files import make_plain_folder
from paceline.training.session import TrainingSession, reopen_recorder
from paceline.training.step import StepReport

_log = logging.getLogger("paceline")
_RECENT = 50
_FEWEST = 10  # losses that are needed to recognise a spike
_MOST_ROLLBACKS = 3
_MOST_IDS = 8


class RollBack(Exception):
    """Return to the last checkpoint and leave this step out."""

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step  # counted from 0, as the state counts


def find_fault(session: TrainingSession, report: StepReport) -> str | None:
    """A description of what is wrong with a step's numbers; None if they are good."""
    if not math.isfinite(report.mean_loss):
        return f"the loss is {report.mean_loss}"
    # Under fp16 the scaler handles an overflow: it skips the update and uses a smaller scale.
    if not math.isfinite(report.grad_norm) and not session.components.step.scaler.is_enabled():
        return f"the loss is {report.mean_loss:.4g}, but a gradient is {report.grad_norm}"
    factor, recent = session.config.guard.spike_factor, session.state.recent_losses
    if not factor:
        return None
    usual = statistics.median(recent) if len(recent) >= _FEWEST else math.inf
    if report.mean_loss > factor * usual:
        return f"the loss is {report.mean_loss:.4g}, {report.mean_loss / usual:.1f} times the usual {usual:.4g}"
    session.state.recent_losses = [*recent, report.mean_loss][-_RECENT:]
    return None


def leave_out(session: TrainingSession, batch: Batch, fault: str) -> None:
    """Skip this step's update if that is allowed; else return to a checkpoint, or stop. Collective."""
    guard, state = session.config.guard, session.state
    findings = [json.loads(text) for text in gather_texts(json.dumps(_diagnose(session, batch)), session.world)]
    text = _describe(state.step + 1, fault, findings)
    _keep_batch(session, batch)
    session.components.step.drop()
    if len(state.skipped) < guard.skip_nonfinite:
        state.skipped.append(state.step)
        _log.warning("warning: %s; skipped (%d of %d)", text, len(state.skipped), guard.skip_nonfinite)
        return
    if guard.on_nonfinite == "rollback":
        raise RollBack(state.step, text)
    raise NonFiniteError(
        text,
        where=f"a copy of the batch is in {session.folder.bad_batches}",
        hint="a lower --base-lr, --clip-norm 1, --no-amp; or --skip-nonfinite 3, --on-nonfinite rollback",
    )


def roll_back(session: TrainingSession, cause: RollBack) -> None:
    """Restore the newest complete checkpoint on all ranks. The bad step will be left out. Collective."""
    session.guards.enter("save", session.state.step)
    session.checkpoints.finish()
    checkpoint = session.checkpoints.choose(session.folder.checkpoints)
    if checkpoint is None:
        raise NonFiniteError(str(cause), got="no checkpoint to go back to", hint="--save-steps 100")
    session.rollbacks[checkpoint.step] = session.rollbacks.get(checkpoint.step, 0) + 1
    if session.rollbacks[checkpoint.step] > _MOST_ROLLBACKS:
        raise NonFiniteError(
            str(cause),
            got=f"went back to step {checkpoint.step} {_MOST_ROLLBACKS} times already",
            hint="a lower --base-lr or --clip-norm 1: it is not the batch",
        )
    jumped = sorted({*session.state.jumped, cause.step})
    session.state = session.components.resume(checkpoint, session.world)
    session.state.jumped = jumped
    session.checkpoints.rewind_to(checkpoint.step)
    reopen_recorder(session)
    _log.warning("warning: %s; went back to step %d, and step %d is left out", cause, checkpoint.step, cause.step + 1)


def _describe(step: int, fault: str, findings: list[dict[str, Any]]) -> str:
    bad = [finding for finding in findings if finding["first_bad"]]
    if not bad:
        return f"{fault} at step {step}, on all ranks together"
    parts = []
    for finding in bad:
        ids = ", ".join(map(str, finding["ids"][:_MOST_IDS])) + (", ..." if len(finding["ids"]) > _MOST_IDS else "")
        parts.append(f"rank {finding['rank']}: first bad tensor {finding['first_bad']}, samples {ids}")
    return f"{fault} at step {step}; " + "; ".join(parts)


def _diagnose(session: TrainingSession, batch: Batch) -> dict[str, Any]:
    """Run this rank's batch again, without the other ranks, and name the first tensor that is not finite."""
    finding: dict[str, Any] = {"rank": session.world.rank, "first_bad": None, "ids": []}
    rows = torch.isfinite(batch.inputs.flatten(1)).all(1).cpu()
    if not bool(rows.all()):
        return {**finding, "first_bad": "the batch's inputs", "ids": batch.ids.cpu()[~rows].tolist()}
    if session.components.model.is_sharded:
        return finding  # a sharded forward pass needs all ranks, and one may have ended
    model = session.components.model.module
    session.components.step.seed(session.state.step, session.world.rank)
    session.components.model.set_keys(session.components.step.share_of(batch, session.state.step).keys)
    with _first_bad_output(model) as found, autocast(session.components.model, session.world):
        logits = model(batch.inputs).float()
        objective = session.components.step.objective
        loss = objective.training_loss(logits, batch.labels, batch.inputs, batch.loss_scale)
    name = found[0] if found else None
    if name is None and not bool(torch.isfinite(loss)):
        name = "the loss"
    if name is None:
        named = {key: p for key, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        bad = [key for key, g in zip(named, gradients, strict=True) if g is not None and not _is_finite(g)]
        name = f"the gradient of {bad[0]}" if bad else None
    return {**finding, "first_bad": name, "ids": batch.ids.tolist() if name else []}


@contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Names of the layers whose output is not finite, in the order in which they ran."""
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and not _is_finite(output):
            found.append(f"the output of {name}")

    hooks = [
        layer.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, layer in model.named_modules()
        if not list(layer.children())
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _keep_batch(session: TrainingSession, batch: Batch) -> None:
    """Write a copy of the batch, as safetensors."""
    tensors = {"inputs": batch.inputs, "labels": batch.labels, "ids": batch.ids}
    pieces = {
        name: Piece(value.detach().cpu().contiguous(), local_box(value), tuple(value.shape))
        for name, value in tensors.items()
    }
    make_plain_folder(session.folder.bad_batches)
    name = f"step-{session.state.step + 1:08}-rank-{session.world.rank}.safetensors"
    write_pieces(session.folder.bad_batches / name, pieces)
