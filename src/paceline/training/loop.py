"""The ride, from the first line of the header to the last line of the summary, in order.

No callbacks: what happens is what stands here. Every rank runs all of it; only the primary's recorder
writes and only the primary's console speaks.
"""

from __future__ import annotations

from typing import Any

from paceline.checkpoints.resume import restore_weights
from paceline.config.schema import Config
from paceline.data.loader import Loader
from paceline.metrics.throughput import EnergyMeter, Stopwatch
from paceline.parallel.collectives import average_buffers
from paceline.report.run_page import leave_page
from paceline.runs.folder import write_json
from paceline.runs.place import RunPlace
from paceline.training.bad_numbers import RollBack, roll_back
from paceline.training.epoch import is_save_due, leave, save, train_epoch
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.examples import Examples, open_examples
from paceline.training.guards import Guards
from paceline.training.narrate import describe_summary
from paceline.training.results import RideTotals, gather_ranks, hash_state, make_results
from paceline.training.ride import Ride, open_ride
from paceline.world.detect import World


def train(
    config: Config, world: World, place: RunPlace, guards: Guards | None = None, *, eval_batches: int | None = None
) -> dict[str, Any]:
    """Train a recipe to its end and return its results."""
    # --- Data, model, strategy, optimizer; fresh, or where an earlier attempt stopped
    ride = open_ride(config, world, place, guards or Guards(), eval_batches=eval_batches)
    rig, checkpoints, console = ride.rig, ride.checkpoints, ride.console

    # --- The ride: train an epoch, look at it, keep it
    plan, watch, energy = rig.plan, Stopwatch(), EnergyMeter(world.device)
    console.start(first_step=ride.state.step, total_steps=plan.last_step)
    train_row: dict[str, Any] = {}
    try:
        while ride.state.step < plan.last_step:
            try:
                train_row = train_epoch(ride, watch)
            except RollBack as cause:
                roll_back(ride, cause)
                continue
            is_best = _look(ride, train_row) if ride.state.step % plan.steps_per_epoch == 0 else False
            is_due = is_save_due(ride.state.step, plan.steps_per_epoch, plan.last_step, config.run)
            if is_best or ride.is_leaving or is_due:
                save(ride, is_best=is_best)
            if ride.is_leaving:
                leave(ride)
        stepping_s = watch.seconds
    finally:
        console.stop()
        checkpoints.wait()
    checkpoints.finish()
    state, recorder = ride.state, ride.recorder
    ride.guards.enter("finish", state.step)
    timing = ride.guards.phases.summary(is_waiting_known=rig.model.exposed.is_known)
    samples = watch.samples // world.world_size
    totals = RideTotals(watch.seconds, stepping_s, samples, watch.wait_s, timing, energy.joules)

    # --- The test set, once, with the best weights
    average_buffers(rig.model.module, world)
    hashes = hash_state(rig, world.device)
    best = checkpoints.best()
    if best is not None:
        restore_weights(best, rig.model.module)
    elif rig.average is not None:
        rig.average.take_over()
    examples = open_examples(rig, world) if eval_batches is None else None
    test = _evaluate(ride, rig.test_data, examples)

    # --- What came of it
    results = make_results(rig, world, state, test, train_row, gather_ranks(world, totals), hashes)
    if recorder is not None:
        epoch = state.step // plan.steps_per_epoch
        values = {"loss": test.loss, "accuracy": test.accuracy, "throughput": test.throughput, **test.metrics}
        recorder.epoch(state.step, epoch=epoch, phase="test", **values)
        recorder.close()
        write_json(ride.folder.results, results)
        if examples is not None:
            examples.write(ride.folder, plan.info.classes)
            leave_page(ride.folder, "finished")
            for line in describe_summary(results, ride.folder):
                console.note(line)
    return results


def _look(ride: Ride, train_row: dict[str, Any]) -> bool:
    """Validate after a whole epoch, record it, and say whether it is the best so far."""
    state = ride.state
    epoch = state.step // ride.rig.plan.steps_per_epoch
    if ride.recorder is not None:
        ride.recorder.epoch(state.step, epoch=epoch, phase="train", **train_row)
    if not len(ride.rig.validation_data):
        ride.console.epoch(epoch, ride.config.train.epochs, train_row, None, False)
        return False
    average_buffers(ride.rig.model.module, ride.world)
    if ride.rig.average is not None:
        with ride.rig.average.in_place():
            validation = _evaluate(ride, ride.rig.validation_data)
    else:
        validation = _evaluate(ride, ride.rig.validation_data)
    is_best = state.is_improved_by(validation.accuracy, validation.loss)
    if is_best:
        state.best_epoch, state.best_accuracy, state.best_loss = epoch, validation.accuracy, validation.loss
    state.validation = {"accuracy": validation.accuracy, "loss": validation.loss}
    val_row = {**state.validation, "throughput": validation.throughput, **validation.metrics}
    if ride.recorder is not None:
        ride.recorder.epoch(state.step, epoch=epoch, phase="val", **val_row)
    ride.console.epoch(epoch, ride.config.train.epochs, train_row, val_row, is_best)
    return is_best


def _evaluate(ride: Ride, data: Loader, examples: Examples | None = None) -> Evaluation:
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
        on_batch=lambda: ride.guards.enter("evaluate", ride.state.step),
        examples=examples,
    )
