"""A training run, from the header to the summary, in the order of events.

Every rank runs this code. The primary alone writes metrics, status and results, and prints. Checkpoints are written by
the primary, under FSDP by all ranks.
"""

from __future__ import annotations

from paceline.checkpoints.resume import restore_weights
from paceline.metrics.throughput import EnergyMeter, Stopwatch
from paceline.parallel.buffers import average_statistics
from paceline.reports.run_page import try_to_write_run_page
from paceline.runs.folder import write_json
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.settings.schema import Config
from paceline.training.bad_numbers import RollBack, roll_back
from paceline.training.epoch import (
    StopAgreed,
    end_or_stop,
    is_over,
    is_save_due,
    require_no_stop,
    save,
    stop_run,
    train_epoch,
)
from paceline.training.examples import open_examples
from paceline.training.guards import Guards
from paceline.training.receipt import try_to_write_receipt
from paceline.training.results import (
    Results,
    RunTotals,
    describe_summary,
    gather_ranks,
    hash_state,
    make_results,
)
from paceline.training.session import open_session
from paceline.training.validate import evaluate_part, validate_epoch


def train(
    config: Config, world: World, place: RunPlace, guards: Guards | None = None, *, eval_batches: int | None = None
) -> Results:
    """Train a recipe to its end and return its results."""
    # --- Data, model, strategy, optimizer; at step 0, or where an earlier attempt stopped
    session = open_session(config, world, place, guards or Guards(), eval_batches=eval_batches)
    components, checkpoints, console = session.components, session.checkpoints, session.console

    # --- Train an epoch, validate, save
    session.guards.start.end()
    plan, watch, energy = components.plan, Stopwatch(), EnergyMeter(world.device)
    console.start(first_step=session.state.step, total_steps=plan.last_step)
    try:
        require_no_stop(session)
        while not is_over(session):
            if not session.state.is_validation_due:  # else an earlier attempt was stopped during the validation
                try:
                    train_epoch(session, watch)
                except RollBack as cause:
                    roll_back(session, cause)
                    continue
            is_best = validate_epoch(session) if plan.clock.locate(session.state.step)[1] == 0 else False
            is_due = is_save_due(session.state.step, plan.clock, plan.last_step, config.run)
            if is_best or is_due or is_over(session):
                save(session, is_best=is_best)
            if session.is_stopping:
                raise StopAgreed
    except StopAgreed:
        end_or_stop(session)
    finally:
        stepping_s = watch.seconds
        console.stop()
        checkpoints.wait()
    checkpoints.finish()
    if session.state.step < plan.last_step and not session.is_ending:
        console.note(f"stopped early: no better validation since epoch {session.state.best_epoch}")
    session.is_ending = True
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
    except StopAgreed:  # a resumed run repeats the test; the model holds the best weights now, not the last
        stop_run(session, can_save=False)

    # --- Results
    results = make_results(session, test, gather_ranks(world, totals), hashes)
    if recorder is not None:
        session.folder.require_owner()
        epoch, _ = plan.clock.locate(state.step)
        recorder.epoch(state.step, epoch=epoch, phase="test", **test.values(), throughput=test.throughput)
        recorder.close()
        write_json(session.folder.results, results.to_json())
        if eval_batches is None:
            if examples is not None:
                examples.write(session.folder, plan.info.classes)
            try_to_write_run_page(session.folder, "finished")
            try_to_write_receipt(session, results)
            for line in describe_summary(results, session.folder):
                console.note(line)
    return results
