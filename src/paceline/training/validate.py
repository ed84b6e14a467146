"""Validation after an epoch: evaluate the validation set, record it, and decide whether it is the best so far."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial

from paceline.data.loader import Loader
from paceline.metrics.screen import ONLY_IN_LOG
from paceline.parallel.buffers import average_statistics
from paceline.settings.tasks import MAXIMISED, best_metric
from paceline.training.epoch import StopAgreed, epoch_row, rank_columns, require_no_stop
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.examples import Examples
from paceline.training.session import TrainingSession

_log = logging.getLogger("paceline")


def validate_epoch(session: TrainingSession) -> bool:
    """Validate after a whole epoch, record it, and say whether it is the best so far.

    A stop request ends it at the next batch, with nothing recorded: the resumed run validates this epoch.
    """
    state = session.state
    epoch, _ = session.components.plan.clock.locate(state.step)
    train_row = epoch_row(session)
    state.validation, state.is_validation_due = None, True
    if session.is_stopping:
        raise StopAgreed
    validation = _validate(session) if len(session.components.validation_data) else None
    state.is_validation_due = False
    if session.recorder is not None:
        columns = rank_columns(session)
        ranks = {"ranks": columns} if columns else {}
        session.recorder.epoch(state.step, epoch=epoch, phase="train", **train_row, **ranks)
    _log_own_samples(session, epoch, train_row["seconds"])
    if validation is None:
        session.console.epoch(epoch, state.step, train_row, None, False)
        return False
    values = validation.values()
    name, direction = best_metric(session.config)
    merit = values[name] if direction == MAXIMISED else -values[name]
    is_best = state.is_improved_by(merit, validation.loss)
    if is_best:
        state.best_epoch, state.best_step = epoch, state.step
        state.best_merit, state.best_accuracy, state.best_loss = merit, validation.accuracy, validation.loss
    state.validation = {**values, "merit": merit}
    val_row = {**values, "throughput": validation.throughput}
    if session.recorder is not None:
        session.recorder.epoch(state.step, epoch=epoch, phase="val", **val_row)
    session.console.epoch(epoch, state.step, train_row, val_row, is_best)
    return is_best


def _log_own_samples(session: TrainingSession, epoch: int, seconds: float) -> None:
    """A line in each rank's own log. The screen has the line of all ranks together."""
    own = {name: values[session.world.rank] for name, values in rank_columns(session).items()}
    if not own:
        return
    accuracy = f", accuracy {own['accuracy']:.2%}" if "accuracy" in own else ""
    text = "epoch %d: loss %.4f%s of %d samples of this rank, %.2f s"
    _log.info(text, epoch, own["loss"], accuracy, own["samples"], seconds, extra=ONLY_IN_LOG)


def _validate(session: TrainingSession) -> Evaluation:
    """Evaluate the model, or its moving average, with the mean of the ranks' running statistics."""
    buffers = list(session.components.model.module.buffers())
    before = [buffer.clone() for buffer in buffers]
    average_statistics(session.components.model.module, session.world)
    try:
        with session.components.average.in_place() if session.components.average is not None else nullcontext():
            return evaluate_part(session, session.components.validation_data)
    except StopAgreed:
        # The resumed run averages again. From the mean it would not get the same bits on every number of ranks.
        for buffer, values in zip(buffers, before, strict=True):
            buffer.copy_(values)
        raise


def evaluate_part(session: TrainingSession, data: Loader, examples: Examples | None = None) -> Evaluation:
    return evaluate(
        session.components.model,
        data,
        session.world,
        num_classes=session.components.plan.info.num_classes,
        batch_size=session.config.train.test_batch_size,
        objective=session.components.step.objective,
        shares_per_rank=session.components.step.lanes_per_rank,
        views=session.config.train.test_views,
        max_batches=session.eval_batches,
        on_batch=partial(_before_batch, session),
        examples=examples,
    )


def _before_batch(session: TrainingSession) -> None:
    session.guards.enter("evaluate", session.state.step)
    require_no_stop(session)
