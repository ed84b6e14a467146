"""The ride, from the first line of the header to the last line of the summary, in order.

No callbacks: what happens is what stands here. Every rank runs all of it; only the primary's recorder
writes and only the primary's console speaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoints.capture import capture_model
from paceline.checkpoints.manager import CheckpointManager, restore_weights
from paceline.checkpoints.store import find_checkpoint
from paceline.config.fields import flatten
from paceline.config.schema import Config
from paceline.errors import NonFiniteError
from paceline.metrics.console import Console
from paceline.metrics.recorder import Recorder
from paceline.metrics.throughput import Stopwatch, read_memory
from paceline.parallel.collectives import average_buffers, sum_over_ranks
from paceline.runs.folder import RunFolder, write_json
from paceline.runs.place import RunPlace
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.narrate import describe_run, describe_summary
from paceline.training.results import RideTotals, gather_ranks, hash_tensors, make_results
from paceline.training.rig import Rig, build_rig
from paceline.training.state import EpochSums, TrainState
from paceline.world.detect import World


@dataclass
class Ride:
    """What the chapters below pass on to each other."""

    config: Config
    world: World
    folder: RunFolder
    rig: Rig
    state: TrainState
    recorder: Recorder | None  # the primary's
    console: Console
    eval_batches: int | None  # a rehearsal looks at a few batches only


def train(
    config: Config, world: World, place: RunPlace, *, eval_batches: int | None = None
) -> dict[str, Any]:
    """Train a recipe to its end and return its results."""
    # --- What the run stands on
    rig = build_rig(config, world)
    checkpoints = CheckpointManager(place.folder / "checkpoints", world)
    console = Console(is_speaking=world.is_primary, metric_lines=config.run.metric_lines)
    for line in describe_run(rig, world, place):
        console.note(line)

    # --- Fresh, or where an earlier attempt stopped
    state = rig.resume(find_checkpoint(place.resume_from)) if place.resume_from else TrainState()
    if place.resume_from:
        console.note(f"resumed   at step {state.step} from {place.resume_from}")
    folder = RunFolder(place.folder)
    recorder = Recorder(folder, resume_step=state.step) if world.is_primary else None
    if recorder is not None:
        recorder.open_trackers(config.run.track, flatten(config))
    ride = Ride(config, world, folder, rig, state, recorder, console, eval_batches)

    # --- The ride: train an epoch, look at it, keep it
    plan, watch = rig.plan, Stopwatch()
    console.start(first_step=state.step, total_steps=plan.last_step)
    train_row: dict[str, Any] = {}
    while state.step < plan.last_step:
        train_row = _train_epoch(ride, watch)
        average_buffers(rig.model.module, world)
        is_whole = state.step % plan.steps_per_epoch == 0
        is_best = _look(ride, train_row) if is_whole else False
        epoch = state.step // plan.steps_per_epoch
        checkpoints.save(
            rig.model.module,
            rig.optimizer,
            rig.average_values(),
            rig.state_json(state),
            is_best=is_best,
            keep=is_whole and config.run.save_frequency > 0 and epoch % config.run.save_frequency == 0,
        )
    console.stop()
    totals = RideTotals(watch.seconds, watch.samples // world.world_size, watch.wait_s)

    # --- The test set, once, with the best weights
    weights_sha256 = hash_tensors(capture_model(rig.model.module, world.device))
    best = checkpoints.best()
    if best is not None:
        restore_weights(best, rig.model.module)
    test = _evaluate(ride, rig.test_data)

    # --- What came of it
    results = make_results(rig, world, state, test, train_row, gather_ranks(world, totals), weights_sha256)
    if recorder is not None:
        epoch = state.step // plan.steps_per_epoch
        recorder.epoch(
            state.step,
            epoch=epoch,
            phase="test",
            loss=test.loss,
            accuracy=test.accuracy,
            throughput=test.throughput,
        )
        recorder.close()
        write_json(folder.results, results)
        for line in describe_summary(results, folder) if eval_batches is None else ():
            console.note(line)
    return results


def _train_epoch(ride: Ride, run_watch: Stopwatch) -> dict[str, Any]:
    """Train to the end of the current epoch, or of the run; returns the epoch's train row."""
    rig, state, world, plan = ride.rig, ride.state, ride.world, ride.rig.plan
    every = ride.config.run.log_frequency
    epoch, first_step = divmod(state.step, plan.steps_per_epoch)
    if first_step == 0:
        state.epoch_sums = EpochSums()
    batches = rig.train_data.train_epoch(
        seed=ride.config.train.seed,
        epoch=epoch,
        global_batch_size=ride.config.train.global_batch_size,
        first_step=first_step,
    )
    interval, epoch_watch = Stopwatch(), Stopwatch()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for batch in batches:
        lr = plan.learning_rate(state.step)
        is_last = state.step + 1 in (plan.last_step, (epoch + 1) * plan.steps_per_epoch)
        is_logged = (state.step + 1) % every == 0 or is_last
        report = rig.step(batch, state.step, lr, want_norm=is_logged)
        state.step += 1
        sums += report.sums
        for watch in (interval, epoch_watch, run_watch):
            watch.count(ride.config.train.global_batch_size, batch.wait_s)
        if is_logged:
            _log_step(ride, sums, report.grad_norm, lr, interval)
            sums.zero_()
            interval.restart()
        if state.step == plan.last_step:
            break
    state.epoch_sums.seconds += epoch_watch.seconds
    return {
        "loss": state.epoch_sums.mean_loss,
        "accuracy": state.epoch_sums.accuracy,
        "throughput": state.epoch_sums.samples / state.epoch_sums.seconds,
        "seconds": state.epoch_sums.seconds,
        "memory_peak_mb": read_memory(world.device).peak_mb,
    }


def _log_step(
    ride: Ride, sums: torch.Tensor, norm: torch.Tensor | None, lr: float, interval: Stopwatch
) -> None:
    """Bring an interval's sums to the host: the only moment the loop waits for the device."""
    norm = norm if norm is not None else sums.new_zeros(())
    packed = torch.cat([sums, norm.to(sums).reshape(1) / ride.world.world_size])
    loss, correct, samples, grad_norm = sum_over_ranks(packed, ride.world).tolist()
    state, last_step = ride.state, ride.rig.plan.last_step
    state.epoch_sums.add(loss, correct, samples)
    memory = read_memory(ride.world.device)
    values = {
        "loss": loss / samples,
        "accuracy": correct / samples,
        "lr": lr,
        "throughput": interval.samples_per_s,
        "data_wait": interval.wait_share,
        "memory_mb": memory.now_mb,
        "memory_peak_mb": memory.peak_mb,
        "grad_norm": grad_norm,
    }
    if loss - loss != 0.0:  # not a number, or infinite
        raise NonFiniteError(
            f"the training loss is {loss / samples} at step {state.step}",
            hint="a lower --base-lr, --clip-norm 1, or --no-amp",
        )
    if ride.recorder is not None:
        ride.recorder.step(state.step, **values)
        eta_s = round(ride.console.remaining_s(state.step, last_step), 1)
        ride.folder.write_status("running", step=state.step, last_step=last_step, eta_s=eta_s)
    ride.console.step(state.step, last_step, values)


def _look(ride: Ride, train_row: dict[str, Any]) -> bool:
    """Validate after a whole epoch, record it, and say whether it is the best so far."""
    state = ride.state
    epoch = state.step // ride.rig.plan.steps_per_epoch
    if ride.rig.average is not None:
        with ride.rig.average.in_place():
            validation = _evaluate(ride, ride.rig.validation_data)
    else:
        validation = _evaluate(ride, ride.rig.validation_data)
    is_best = state.is_improved_by(validation.accuracy, validation.loss)
    if is_best:
        state.best_epoch, state.best_accuracy, state.best_loss = epoch, validation.accuracy, validation.loss
    val_row = {"loss": validation.loss, "accuracy": validation.accuracy, "throughput": validation.throughput}
    if ride.recorder is not None:
        ride.recorder.epoch(state.step, epoch=epoch, phase="train", **train_row)
        ride.recorder.epoch(state.step, epoch=epoch, phase="val", **val_row)
    ride.console.epoch(epoch, ride.config.train.epochs, train_row, val_row, is_best)
    return is_best


def _evaluate(ride: Ride, data: Any) -> Evaluation:
    return evaluate(
        ride.rig.model,
        data,
        ride.world,
        num_classes=ride.rig.plan.info.num_classes,
        batch_size=ride.config.train.test_batch_size,
        max_batches=ride.eval_batches,
    )
