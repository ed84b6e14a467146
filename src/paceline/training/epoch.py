"""One epoch of training: batches in, updates out, and now and then a line about it."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

import torch

from paceline.data.loader import Batch
from paceline.errors import Preempted
from paceline.metrics.safe_output import describe_console_loss
from paceline.metrics.throughput import Stopwatch, read_memory
from paceline.parallel.collectives import gather_texts, is_true_on_any, tree_sum, wait_for_all
from paceline.runs.epoch_clock import EpochClock
from paceline.runtime.requeue import requeue_job
from paceline.settings.schema import RunConfig
from paceline.training.bad_numbers import find_fault, leave_out
from paceline.training.session import TrainingSession
from paceline.training.state import EpochSums
from paceline.training.step import StepReport

_STATUS_EVERY_S = 0.25


class StopAgreed(Exception):
    """The ranks agreed to stop. Raised on all of them at the same batch."""


def train_epoch(session: TrainingSession, run_watch: Stopwatch) -> None:
    """Train to the end of the current epoch, or of the run."""
    config, components, state, plan = session.config, session.components, session.state, session.components.plan
    epoch, first_step = plan.clock.locate(state.step)
    if first_step == 0:
        state.epoch_sums = EpochSums()
    batches = components.train_data.train_epoch(
        seed=config.train.seed,
        epoch=epoch,
        global_batch_size=config.train.global_batch_size,
        first_step=first_step,
    )
    interval, epoch_watch = Stopwatch(), Stopwatch()
    sums = torch.zeros(components.step.lanes_per_rank, 3, dtype=torch.float64, device=session.world.device)
    busy_s = 0.0  # this rank's own work since the last line
    last_step = min(plan.last_step, plan.clock.end_of(epoch + 1))
    while state.step < last_step:
        session.guards.enter("data", state.step + 1)
        batch = next(batches)
        lr = plan.learning_rate(state.step)
        report = _take_step(session, batch, lr)
        session.guards.phases.enter("other")
        state.step += 1
        if report is not None:
            sums += report.sums
            busy_s += report.busy_s + batch.wait_s
        for watch in (interval, epoch_watch, run_watch):
            watch.count(config.train.global_batch_size, batch.wait_s)
        session.is_leaving |= report is not None and report.is_stop_wanted
        is_due = session.is_leaving or is_save_due(state.step, plan.clock, plan.last_step, config.run)
        is_saved = is_due and state.step != last_step  # the loop saves the last one, with its validation
        if state.step % config.run.log_frequency == 0 or state.step == last_step or is_saved:
            _log_step(session, _with_column(sums, busy_s), report, lr, interval)
            sums.zero_()
            busy_s = 0.0
            interval.restart()
        if is_saved:
            state.epoch_sums.seconds += epoch_watch.seconds
            epoch_watch.restart()
            save(session, is_best=False)
            if session.is_leaving:
                raise StopAgreed
    state.epoch_sums.seconds += epoch_watch.seconds


def epoch_row(session: TrainingSession) -> dict[str, Any]:
    """What the epoch so far gave in training, also if an earlier attempt trained it."""
    sums = session.state.epoch_sums
    return {
        "loss": sums.mean_loss,
        "accuracy": sums.accuracy,
        "throughput": sums.samples / max(sums.seconds, 1e-9),
        "seconds": sums.seconds,
        "memory_peak_mb": read_memory(session.world.device).peak_mb,
    }


def rank_columns(session: TrainingSession) -> dict[str, list[float]]:
    """What each rank's own samples gave in this epoch, in the order of ranks.

    Empty where it is not known: a run that was resumed after its last step, on another number of ranks or from an
    older checkpoint.
    """
    rows = session.state.epoch_sums.ranks
    if len(rows) != session.world.world_size:
        return {}
    return {
        "loss": [loss / max(samples, 1) for loss, _, samples in rows],
        "accuracy": [correct / max(samples, 1) for _, correct, samples in rows],
        "samples": [samples for _, _, samples in rows],
    }


def _take_step(session: TrainingSession, batch: Batch, lr: float) -> StepReport | None:
    """Gradients, a look at them, and the update; None for a step that is left out."""
    step, state, guards = session.components.step, session.state, session.guards
    if state.step in state.jumped:
        return None
    if guards.faults:
        batch = guards.faults.touch(batch, session.components.model.module, state.step + 1)
    report = step.gradients(batch, state.step, wants_stop=_is_stop_due(session))
    if report.is_stop_wanted and _is_saved(session):
        raise StopAgreed  # this very step is on disk: training one more would only cost a second save
    fault = find_fault(session, report)
    if fault is not None:
        leave_out(session, batch, fault)
        return None
    guards.enter("update", state.step + 1)
    step.update(state.step, lr, report)
    return report


def _is_stop_due(session: TrainingSession) -> bool:
    return session.guards.stop.is_due(session.config.guard.notice_s, _seconds_to_leave(session))


def require_no_stop(session: TrainingSession) -> None:
    """Between batches of an evaluation, and before the first step. Collective."""
    if is_true_on_any(_is_stop_due(session), session.world):
        raise StopAgreed


def _is_saved(session: TrainingSession) -> bool:
    """Whether a checkpoint of this step is on disk. Waits for a save that is under way. Collective."""
    step = session.state.step
    if step != session.checkpoints.started_step:  # the same on all ranks
        return False
    session.guards.enter("save", step)
    session.checkpoints.finish()
    return is_true_on_any(session.world.is_primary and session.checkpoints.saved_step == step, session.world)


def _seconds_to_leave(session: TrainingSession) -> float:
    """What one more step and a save will take, generously."""
    return 2 * session.checkpoints.last_save_s + 2 * session.guards.watchdog.longest_step_s + 1.0


def leave(session: TrainingSession, *, can_save: bool = True) -> NoReturn:
    """Asked to stop: save what is not saved yet, tell it, and end on every rank."""
    session.console.stop()
    step = session.state.step
    if can_save and step > 0 and not _is_saved(session):
        save(session, is_best=False)
    session.guards.enter("save", step)
    is_saved = step > 0 and _is_saved(session)
    reason = next(
        (text for text in gather_texts(session.guards.stop.reason or "", session.world) if text), "asked to stop"
    )
    if session.recorder is not None:
        session.recorder.close()
        save_s = round(session.checkpoints.last_save_s, 3)
        told = {"step": step, "reason": reason, "save_s": save_s, **describe_console_loss()}
        session.folder.write_status("preempted" if is_saved else "failed", **told)
        # Before anybody leaves: srun may end the other tasks of a job as soon as the first one is gone.
        requeue_job(reason, session.folder.requeues, step)
    wait_for_all(session.world)
    if is_saved:
        command = session.folder.resume_command
        hint = command and f"the same launcher, with {command.removeprefix('paceline ')}"
        raise Preempted(f"stopped at step {step} and saved ({reason})", hint=hint)
    where = None if session.folder.is_temporary else str(session.folder.path)
    raise Preempted(f"stopped at step {step} without a checkpoint of it ({reason})", where=where)


def _with_column(sums: torch.Tensor, busy_s: float) -> torch.Tensor:
    """The sums of an interval, lane by lane, and the seconds of work behind them, which the first lane stands for."""
    column = torch.zeros_like(sums[:, :1])
    column[0] = busy_s
    return torch.cat([sums, column], dim=1)


def _log_step(
    session: TrainingSession, sums: torch.Tensor, report: StepReport | None, lr: float, interval: Stopwatch
) -> None:
    """Bring an interval's sums to the host, add them up over ranks, and tell."""
    rows = session.components.step.gather(sums)
    loss, correct, samples, _ = tree_sum(rows).tolist()
    state, last_step = session.state, session.components.plan.last_step
    state.epoch_sums.add(loss, correct, samples)
    lanes = rows[:, :3].view(session.world.world_size, -1, 3)
    state.epoch_sums.add_ranks(lanes.sum(1).tolist())
    session.stragglers.look(rows[:, 3], state.step)
    if samples == 0:
        return  # every step since the last line was left out, and told so
    memory = read_memory(session.world.device)
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
    if session.recorder is not None:
        session.recorder.step(state.step, **values)
        _tell_status(session)
    session.console.step(state.step, last_step, values)


def _tell_status(session: TrainingSession) -> None:
    """For whoever looks on from outside, and nobody looks so often. A folder that is lost is noticed at once."""
    now = time.monotonic()
    if now - session.status_told_at < _STATUS_EVERY_S and os.access(session.folder.path, os.W_OK):
        return
    session.status_told_at = now
    step, last_step = session.state.step, session.components.plan.last_step
    eta_s = round(session.console.remaining_s(step, last_step), 1)
    save_s = round(session.checkpoints.last_save_s, 3)
    told = {"step": step, "last_step": last_step, "eta_s": eta_s, "save_s": save_s, **describe_console_loss()}
    session.folder.write_status("running", **told)


def is_save_due(step: int, clock: EpochClock, last_step: int, run: RunConfig) -> bool:
    """Whether any schedule asks for a checkpoint after this step: the one rule, inside an epoch and at its end."""
    if step == last_step or (run.save_steps > 0 and step % run.save_steps == 0):
        return True
    epoch, inside = clock.locate(step)
    return inside == 0 and (epoch % run.save_epochs == 0 or _is_kept_for_ever(epoch, run))


def _is_kept_for_ever(epoch: int, run: RunConfig) -> bool:
    return run.keep_every_epochs > 0 and epoch % run.keep_every_epochs == 0


def save(session: TrainingSession, *, is_best: bool) -> None:
    """Hand the whole state to the checkpoint manager. Collective."""
    session.guards.enter("save", session.state.step)
    state = session.state
    epoch, inside = session.components.plan.clock.locate(state.step)
    if inside:
        state.validation = None
    keep = inside == 0 and _is_kept_for_ever(epoch, session.config.run)
    session.checkpoints.save(
        session.components.payload(session.world),
        session.components.state_json(state, keep=keep),
        session.components.about(state),
        is_best=is_best,
    )
