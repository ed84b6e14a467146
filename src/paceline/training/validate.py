"""The look at an epoch: validation data through the model, a row for it, and whether it is the best so far."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial

from paceline.data.loader import Loader
from paceline.metrics.screen import ONLY_IN_LOG
from paceline.parallel.buffers import average_statistics
from paceline.training.epoch import StopAgreed, epoch_row, rank_columns, require_no_stop
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.examples import Examples
from paceline.training.ride import Ride

_log = logging.getLogger("paceline")


def validate_epoch(ride: Ride) -> bool:
    """Validate after a whole epoch, record it, and say whether it is the best so far.

    A stop request ends it at the next batch, with nothing recorded: the resumed run validates this epoch.
    """
    state = ride.state
    epoch, _ = ride.rig.plan.clock.locate(state.step)
    train_row = epoch_row(ride)
    state.validation, state.is_validation_due = None, True
    if ride.is_leaving:
        raise StopAgreed
    validation = _validate(ride) if len(ride.rig.validation_data) else None
    state.is_validation_due = False
    if ride.recorder is not None:
        columns = rank_columns(ride)
        ranks = {"ranks": columns} if columns else {}
        ride.recorder.epoch(state.step, epoch=epoch, phase="train", **train_row, **ranks)
    _log_own_part(ride, epoch, train_row["seconds"])
    if validation is None:
        ride.console.epoch(epoch, state.step, train_row, None, False)
        return False
    is_best = state.is_improved_by(validation.accuracy, validation.loss)
    if is_best:
        state.best_epoch, state.best_step = epoch, state.step
        state.best_accuracy, state.best_loss = validation.accuracy, validation.loss
    state.validation = {"accuracy": validation.accuracy, "loss": validation.loss}
    val_row = {**state.validation, "throughput": validation.throughput, **validation.metrics}
    if ride.recorder is not None:
        ride.recorder.epoch(state.step, epoch=epoch, phase="val", **val_row)
    ride.console.epoch(epoch, state.step, train_row, val_row, is_best)
    return is_best


def _log_own_part(ride: Ride, epoch: int, seconds: float) -> None:
    """A line in each rank's own log. The screen has the line of all ranks together."""
    own = {name: values[ride.world.rank] for name, values in rank_columns(ride).items()}
    if not own:
        return
    text = "epoch %d: loss %.4f, accuracy %.2f%% of %d samples of this rank, %.2f s"
    values = (epoch, own["loss"], 100 * own["accuracy"], own["samples"], seconds)
    _log.info(text, *values, extra=ONLY_IN_LOG)


def _validate(ride: Ride) -> Evaluation:
    """Evaluate the model, or its moving average, with the mean of the ranks' running statistics."""
    buffers = list(ride.rig.model.module.buffers())
    before = [buffer.clone() for buffer in buffers]
    average_statistics(ride.rig.model.module, ride.world)
    try:
        with ride.rig.average.in_place() if ride.rig.average is not None else nullcontext():
            return evaluate_part(ride, ride.rig.validation_data)
    except StopAgreed:
        # The resumed run averages again. From the mean it would not get the same bits on every number of ranks.
        for buffer, values in zip(buffers, before, strict=True):
            buffer.copy_(values)
        raise


def evaluate_part(ride: Ride, data: Loader, examples: Examples | None = None) -> Evaluation:
    return evaluate(
        ride.rig.model,
        data,
        ride.world,
        num_classes=ride.rig.plan.info.num_classes,
        batch_size=ride.config.train.test_batch_size,
        objective=ride.rig.step.objective,
        shares_per_rank=ride.rig.step.lanes_per_rank,
        views=ride.config.train.test_views,
        max_batches=ride.eval_batches,
        on_batch=partial(_before_batch, ride),
        examples=examples,
    )


def _before_batch(ride: Ride) -> None:
    ride.guards.enter("evaluate", ride.state.step)
    require_no_stop(ride)
