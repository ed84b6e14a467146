"""A training run, from the header to the summary, in the order of events.

Every rank runs all of it. Only the recorder of the primary writes files, and only its console prints.
"""

from __future__ import annotations

from typing import Any

from paceline.checkpoints.resume import restore_weights
from paceline.metrics.throughput import EnergyMeter, Stopwatch
from paceline.parallel.buffers import average_statistics
from paceline.reports.run_page import try_to_write_run_page
from paceline.runs.folder import write_json
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.settings.schema import Config
from paceline.training.bad_numbers import RollBack, roll_back
from paceline.training.epoch import StopAgreed, epoch_row, is_save_due, leave, require_no_stop, save, train_epoch
from paceline.training.examples import open_examples
from paceline.training.guards import Guards
from paceline.training.results import RunTotals, gather_ranks, hash_state, make_results
from paceline.training.run_summary import describe_summary
from paceline.training.session import open_session
from paceline.training.validate import evaluate_part, validate_epoch


def train(
    config: Config, world: World, place: RunPlace, guards: Guards | None = None, *, eval_batches: int | None = None
) -> dict[str, Any]:
    """Train a recipe to its end and return its results."""
    # --- Data, model, strategy, optimizer; fresh, or where an earlier attempt stopped
    session = open_session(config, world, place, guards or Guards(), eval_batches=eval_batches)
    components, checkpoints, console = session.components, session.checkpoints, session.console

    # --- The session: train an epoch, look at it, keep it
    plan, watch, energy = components.plan, Stopwatch(), EnergyMeter(world.device)
    console.start(first_step=session.state.step, total_steps=plan.last_step)
    try:
        require_no_stop(session)
        while session.state.step < plan.last_step or session.state.is_validation_due:
            if not session.state.is_validation_due:  # else an earlier attempt was stopped in it
                try:
                    train_epoch(session, watch)
                except RollBack as cause:
                    roll_back(session, cause)
                    continue
            is_best = validate_epoch(session) if plan.clock.locate(session.state.step)[1] == 0 else False
            is_due = is_save_due(session.state.step, plan.clock, plan.last_step, config.run)
            if is_best or is_due:
                save(session, is_best=is_best)
            if session.is_leaving:
                raise StopAgreed
        stepping_s = watch.seconds
    except StopAgreed:
        leave(session)
    finally:
        console.stop()
        checkpoints.wait()
    checkpoints.finish()
    state, recorder = session.state, session.recorder
    session.guards.enter("finish", state.step)
    timing = session.guards.phases.summary(is_waiting_known=components.model.exposed.is_known)
    samples = watch.samples // world.world_size
    totals = RunTotals(watch.seconds, stepping_s, samples, watch.wait_s, timing, energy.joules)

    # --- The test set, once, with the best weights
    average_statistics(components.model.module, world)
    hashes = hash_state(components, world.device)
    best = checkpoints.best()
    if best is not None:
        restore_weights(best, components.model.module)
    elif components.average is not None:
        components.average.take_over()
    examples = open_examples(components, world) if eval_batches is None else None
    try:
        test = evaluate_part(session, components.test_data, examples)
    except StopAgreed:  # a resumed run goes on with the test; these weights are the best ones, not the last ones
        leave(session, can_save=False)

    # --- What came of it
    results = make_results(components, world, state, test, epoch_row(session), gather_ranks(world, totals), hashes)
    if recorder is not None:
        session.folder.require_owner()
        epoch, _ = plan.clock.locate(state.step)
        values = {"loss": test.loss, "accuracy": test.accuracy, "throughput": test.throughput, **test.metrics}
        recorder.epoch(state.step, epoch=epoch, phase="test", **values)
        recorder.close()
        write_json(session.folder.results, results)
        if examples is not None:
            examples.write(session.folder, plan.info.classes)
            try_to_write_run_page(session.folder, "finished")
            for line in describe_summary(results, session.folder, plan.info):
                console.note(line)
    return results
