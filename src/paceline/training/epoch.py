"""One epoch of training: batches in, updates out, and now and then a line about it."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

import torch

from paceline.config.schema import RunConfig
from paceline.data.loader import Batch
from paceline.errors import Preempted
from paceline.metrics.safe_output import describe_console_loss
from paceline.metrics.throughput import Stopwatch, read_memory
from paceline.parallel.collectives import gather_texts, is_true_on_any, tree_sum, wait_for_all
from paceline.runs.epoch_clock import EpochClock
from paceline.training.bad_numbers import find_fault, leave_out
from paceline.training.ride import Ride
from paceline.training.state import EpochSums
from paceline.training.step import StepReport
from paceline.world.requeue import requeue_job

_STATUS_EVERY_S = 0.25


class StopAgreed(Exception):
    """The ranks agreed to stop. Raised on all of them at the same batch."""


def train_epoch(ride: Ride, run_watch: Stopwatch) -> None:
    """Train to the end of the current epoch, or of the run."""
    config, rig, state, plan = ride.config, ride.rig, ride.state, ride.rig.plan
    epoch, first_step = plan.clock.locate(state.step)
    if first_step == 0:
        state.epoch_sums = EpochSums()
    batches = rig.train_data.train_epoch(
        seed=config.train.seed,
        epoch=epoch,
        global_batch_size=config.train.global_batch_size,
        first_step=first_step,
    )
    interval, epoch_watch = Stopwatch(), Stopwatch()
    sums = torch.zeros(rig.step.lanes_per_rank, 3, dtype=torch.float64, device=ride.world.device)
    busy_s = 0.0  # this rank's own work since the last line
    last_step = min(plan.last_step, plan.clock.end_of(epoch + 1))
    while state.step < last_step:
        ride.guards.enter("data", state.step + 1)
        batch = next(batches)
        lr = plan.learning_rate(state.step)
        report = _take_step(ride, batch, lr)
        ride.guards.phases.enter("other")
        state.step += 1
        if report is not None:
            sums += report.sums
            busy_s += report.busy_s + batch.wait_s
        for watch in (interval, epoch_watch, run_watch):
            watch.count(config.train.global_batch_size, batch.wait_s)
        ride.is_leaving |= report is not None and report.is_stop_wanted
        is_due = ride.is_leaving or is_save_due(state.step, plan.clock, plan.last_step, config.run)
        is_saved = is_due and state.step != last_step  # the loop saves the last one, with its validation
        if state.step % config.run.log_frequency == 0 or state.step == last_step or is_saved:
            _log_step(ride, _with_column(sums, busy_s), report, lr, interval)
            sums.zero_()
            busy_s = 0.0
            interval.restart()
        if is_saved:
            state.epoch_sums.seconds += epoch_watch.seconds
            epoch_watch.restart()
            save(ride, is_best=False)
            if ride.is_leaving:
                raise StopAgreed
    state.epoch_sums.seconds += epoch_watch.seconds


def epoch_row(ride: Ride) -> dict[str, Any]:
    """What the epoch so far gave in training, also if an earlier attempt trained it."""
    sums = ride.state.epoch_sums
    return {
        "loss": sums.mean_loss,
        "accuracy": sums.accuracy,
        "throughput": sums.samples / max(sums.seconds, 1e-9),
        "seconds": sums.seconds,
        "memory_peak_mb": read_memory(ride.world.device).peak_mb,
    }


def rank_columns(ride: Ride) -> dict[str, list[float]]:
    """What each rank's own samples gave in this epoch, in the order of ranks.

    Empty where it is not known: a run that was resumed after its last step, on another number of ranks or from an
    older checkpoint.
    """
    rows = ride.state.epoch_sums.ranks
    if len(rows) != ride.world.world_size:
        return {}
    return {
        "loss": [loss / max(samples, 1) for loss, _, samples in rows],
        "accuracy": [correct / max(samples, 1) for _, correct, samples in rows],
        "samples": [samples for _, _, samples in rows],
    }


def _take_step(ride: Ride, batch: Batch, lr: float) -> StepReport | None:
    """Gradients, a look at them, and the update; None for a step that is left out."""
    step, state, guards = ride.rig.step, ride.state, ride.guards
    if state.step in state.jumped:
        return None
    if guards.faults:
        batch = guards.faults.touch(batch, ride.rig.model.module, state.step + 1)
    report = step.gradients(batch, state.step, wants_stop=_is_stop_due(ride))
    if report.is_stop_wanted and _is_saved(ride):
        raise StopAgreed  # this very step is on disk: training one more would only cost a second save
    fault = find_fault(ride, report)
    if fault is not None:
        leave_out(ride, batch, fault)
        return None
    guards.enter("update", state.step + 1)
    step.update(state.step, lr, report)
    return report


def _is_stop_due(ride: Ride) -> bool:
    return ride.guards.stop.is_due(ride.config.guard.notice, _seconds_to_leave(ride))


def require_no_stop(ride: Ride) -> None:
    """Between batches of an evaluation, and before the first step. Collective."""
    if is_true_on_any(_is_stop_due(ride), ride.world):
        raise StopAgreed


def _is_saved(ride: Ride) -> bool:
    """Whether a checkpoint of this step is on disk. Waits for a save that is under way. Collective."""
    step = ride.state.step
    if step != ride.checkpoints.started_step:  # the same on all ranks
        return False
    ride.guards.enter("save", step)
    ride.checkpoints.finish()
    return is_true_on_any(ride.world.is_primary and ride.checkpoints.saved_step == step, ride.world)


def _seconds_to_leave(ride: Ride) -> float:
    """What one more step and a save will take, generously."""
    return 2 * ride.checkpoints.last_save_s + 2 * ride.guards.watchdog.longest_step_s + 1.0


def leave(ride: Ride, *, can_save: bool = True) -> NoReturn:
    """Asked to stop: save what is not saved yet, tell it, and end on every rank."""
    ride.console.stop()
    step = ride.state.step
    if can_save and step > 0 and not _is_saved(ride):
        save(ride, is_best=False)
    ride.guards.enter("save", step)
    is_saved = step > 0 and _is_saved(ride)
    reason = next((text for text in gather_texts(ride.guards.stop.reason or "", ride.world) if text), "asked to stop")
    if ride.recorder is not None:
        ride.recorder.close()
        save_s = round(ride.checkpoints.last_save_s, 3)
        told = {"step": step, "reason": reason, "save_s": save_s, **describe_console_loss()}
        ride.folder.write_status("preempted" if is_saved else "failed", **told)
        # Before anybody leaves: srun may end the other tasks of a job as soon as the first one is gone.
        requeue_job(reason, ride.folder.requeues, step)
    wait_for_all(ride.world)
    if is_saved:
        flag = ride.folder.resume_flag
        raise Preempted(f"stopped at step {step} and saved ({reason})", hint=flag and f"go on with {flag}")
    where = None if ride.folder.is_temporary else str(ride.folder.path)
    raise Preempted(f"stopped at step {step} without a checkpoint of it ({reason})", where=where)


def _with_column(sums: torch.Tensor, busy_s: float) -> torch.Tensor:
    """The sums of an interval, lane by lane, and the seconds of work behind them, which the first lane stands for."""
    column = torch.zeros_like(sums[:, :1])
    column[0] = busy_s
    return torch.cat([sums, column], dim=1)


def _log_step(ride: Ride, sums: torch.Tensor, report: StepReport | None, lr: float, interval: Stopwatch) -> None:
    """Bring an interval's sums to the host, add them up over ranks, and tell."""
    rows = ride.rig.step.gather(sums)
    loss, correct, samples, _ = tree_sum(rows).tolist()
    state, last_step = ride.state, ride.rig.plan.last_step
    state.epoch_sums.add(loss, correct, samples)
    lanes = rows[:, :3].view(ride.world.world_size, -1, 3)
    state.epoch_sums.add_ranks(lanes.sum(1).tolist())
    ride.stragglers.look(rows[:, 3], state.step)
    if samples == 0:
        return  # every step since the last line was left out, and told so
    memory = read_memory(ride.world.device)
    values = {
        "loss": loss / samples,
        "accuracy": correct / samples,
        "lr": lr,
        "throughput": interval.samples_per_s,
        "data_wait": interval.wait_share,
        "memory_mb": memory.now_mb,
        "memory_peak_mb": memory.peak_mb,
        "grad_norm": report.grad_norm if report else 0.0,
    }
    if ride.recorder is not None:
        ride.recorder.step(state.step, **values)
        _tell_status(ride)
    ride.console.step(state.step, last_step, values)


def _tell_status(ride: Ride) -> None:
    """For whoever looks on from outside, and nobody looks so often. A folder that is lost is noticed at once."""
    now = time.monotonic()
    if now - ride.status_told_at < _STATUS_EVERY_S and os.access(ride.folder.path, os.W_OK):
        return
    ride.status_told_at = now
    step, last_step = ride.state.step, ride.rig.plan.last_step
    eta_s = round(ride.console.remaining_s(step, last_step), 1)
    save_s = round(ride.checkpoints.last_save_s, 3)
    told = {"step": step, "last_step": last_step, "eta_s": eta_s, "save_s": save_s, **describe_console_loss()}
    ride.folder.write_status("running", **told)


def is_save_due(step: int, clock: EpochClock, last_step: int, run: RunConfig) -> bool:
    """Whether any schedule asks for a checkpoint after this step: the one rule, inside an epoch and at its end."""
    if step == last_step or (run.save_steps > 0 and step % run.save_steps == 0):
        return True
    epoch, inside = clock.locate(step)
    return inside == 0 and (epoch % run.save_epochs == 0 or _is_kept_for_ever(epoch, run))


def _is_kept_for_ever(epoch: int, run: RunConfig) -> bool:
    return run.save_frequency > 0 and epoch % run.save_frequency == 0


def save(ride: Ride, *, is_best: bool) -> None:
    """Hand the whole state to the checkpoint manager. Collective."""
    ride.guards.enter("save", ride.state.step)
    state = ride.state
    epoch, inside = ride.rig.plan.clock.locate(state.step)
    if inside:
        state.validation = None
    keep = inside == 0 and _is_kept_for_ever(epoch, ride.config.run)
    ride.checkpoints.save(
        ride.rig.payload(ride.world),
        ride.rig.state_json(state, keep=keep),
        ride.rig.about(state),
        is_best=is_best,
    )
