"""A training run, from the header to the summary, in the order of events.

Every rank runs all of it. Only the recorder of the primary writes files, and only its console prints.
"""

from __future__ import annotations

from typing import Any

from paceline.checkpoints.resume import restore_weights
from paceline.config.schema import Config
from paceline.metrics.throughput import EnergyMeter, Stopwatch
from paceline.parallel.buffers import average_statistics
from paceline.report.run_page import leave_page
from paceline.runs.folder import write_json
from paceline.runs.place import RunPlace
from paceline.training.bad_numbers import RollBack, roll_back
from paceline.training.epoch import StopAgreed, epoch_row, is_save_due, leave, require_no_stop, save, train_epoch
from paceline.training.examples import open_examples
from paceline.training.guards import Guards
from paceline.training.narrate import describe_summary
from paceline.training.results import RideTotals, gather_ranks, hash_state, make_results
from paceline.training.ride import open_ride
from paceline.training.validate import evaluate_part, validate_epoch
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
    try:
        require_no_stop(ride)
        while ride.state.step < plan.last_step or ride.state.is_validation_due:
            if not ride.state.is_validation_due:  # else an earlier attempt was stopped in it
                try:
                    train_epoch(ride, watch)
                except RollBack as cause:
                    roll_back(ride, cause)
                    continue
            is_best = validate_epoch(ride) if plan.clock.locate(ride.state.step)[1] == 0 else False
            is_due = is_save_due(ride.state.step, plan.clock, plan.last_step, config.run)
            if is_best or is_due:
                save(ride, is_best=is_best)
            if ride.is_leaving:
                raise StopAgreed
        stepping_s = watch.seconds
    except StopAgreed:
        leave(ride)
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
    average_statistics(rig.model.module, world)
    hashes = hash_state(rig, world.device)
    best = checkpoints.best()
    if best is not None:
        restore_weights(best, rig.model.module)
    elif rig.average is not None:
        rig.average.take_over()
    examples = open_examples(rig, world) if eval_batches is None else None
    try:
        test = evaluate_part(ride, rig.test_data, examples)
    except StopAgreed:  # a resumed run goes on with the test; these weights are the best ones, not the last ones
        leave(ride, can_save=False)

    # --- What came of it
    results = make_results(rig, world, state, test, epoch_row(ride), gather_ranks(world, totals), hashes)
    if recorder is not None:
        ride.folder.require_owner()
        epoch, _ = plan.clock.locate(state.step)
        values = {"loss": test.loss, "accuracy": test.accuracy, "throughput": test.throughput, **test.metrics}
        recorder.epoch(state.step, epoch=epoch, phase="test", **values)
        recorder.close()
        write_json(ride.folder.results, results)
        if examples is not None:
            examples.write(ride.folder, plan.info.classes)
            leave_page(ride.folder, "finished")
            for line in describe_summary(results, ride.folder, plan.info):
                console.note(line)
    return results
