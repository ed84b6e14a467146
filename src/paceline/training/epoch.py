"""One epoch of training: a step per batch, a log line per interval, checkpoints, and an agreed stop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from paceline.data.loader import Batch
from paceline.errors import Preempted
from paceline.metrics.safe_output import describe_console_loss
from paceline.metrics.step_trace import LEFT_OUT
from paceline.metrics.throughput import Stopwatch, read_memory
from paceline.parallel.collectives import gather_texts, is_true_on_any, tree_sum, wait_for_all
from paceline.runs.epoch_clock import EpochClock
from paceline.runtime.caller import is_end_with_results_wanted
from paceline.runtime.slurm import requeue_job
from paceline.settings.schema import RunConfig
from paceline.settings.tasks import REGRESSION
from paceline.training.audit import audit_bad_step, audit_step
from paceline.training.audit_plan import plan_audits
from paceline.training.bad_numbers import find_fault, leave_out
from paceline.training.session import TrainingSession
from paceline.training.state import EpochSums
from paceline.training.step import StepReport

_STATUS_INTERVAL_S = 1.0


class StopAgreed(Exception):
    """The ranks agreed to stop. Raised on all of them at the same batch."""


@dataclass(frozen=True)
class TakenStep:
    batch: Batch  # this rank's share
    lr: float
    report: StepReport | None  # None: the step was left out


def train_epoch(session: TrainingSession, run_watch: Stopwatch) -> None:
    """Train to the end of the current epoch, or of the run. Raises StopAgreed, or RollBack after a bad step."""
    config, components, state, plan = session.config, session.components, session.state, session.components.plan
    epoch, inside = plan.clock.locate(state.step)
    if inside == 0:
        state.epoch_sums = EpochSums()
    interval, epoch_watch = Stopwatch(), Stopwatch()
    sums = components.step.new_sums()
    busy_s = 0.0  # this rank's own work since the last line
    last_step = min(plan.last_step, plan.clock.end_of(epoch + 1))
    for taken in take_steps(session, last_step):
        batch, report = taken.batch, taken.report
        if report is not None:
            sums.add(report.sums)
            busy_s += report.busy_s + batch.wait_s
        if session.recorder is not None:
            session.recorder.trace(*((report.mean_loss, report.grad_norm) if report is not None else LEFT_OUT))
        for watch in (interval, epoch_watch, run_watch):
            watch.count(config.train.global_batch_size, batch.wait_s)
        session.is_stopping |= report is not None and report.is_stop_wanted
        is_due = session.is_stopping or is_save_due(state.step, plan.clock, plan.last_step, config.run)
        is_saved = is_due and state.step != last_step  # the loop saves the last one, with its validation
        if state.step % config.run.log_frequency == 0 or state.step == last_step or is_saved:
            _log_step(session, sums.take(busy_s), report, taken.lr, interval)
            busy_s = 0.0
            interval.restart()
        if is_saved:
            state.epoch_sums.seconds += epoch_watch.seconds
            epoch_watch.restart()
            save(session, is_best=False)
            if session.is_stopping:
                raise StopAgreed
    state.epoch_sums.seconds += epoch_watch.seconds


def take_steps(session: TrainingSession, last_step: int) -> Iterator[TakenStep]:
    """Take the steps of the current epoch up to `last_step`, one by one. Counts them in the state.

    Raises StopAgreed, or RollBack after a bad step.
    """
    config, components, state, plan = session.config, session.components, session.state, session.components.plan
    epoch, first_step = plan.clock.locate(state.step)
    components.step.begin_epoch(state.step)
    batches = components.train_data.train_epoch(
        seed=config.train.seed,
        epoch=epoch,
        global_batch_size=config.train.global_batch_size,
        first_step=first_step,
        batch_scale=components.step.objective.batch_scale,
        audits=plan_audits(
            config,
            session.world,
            components.step.lanes_per_rank,
            range(plan.clock.end_of(epoch), plan.clock.end_of(epoch + 1)),
        ),
    )
    while state.step < last_step:
        session.guards.enter("data", state.step + 1)
        batch = next(batches)
        lr = plan.learning_rate(state.step)
        report = _take_step(session, batch, lr)
        session.guards.phases.enter("other")
        state.step += 1
        yield TakenStep(batch, lr, report)


def is_over(session: TrainingSession) -> bool:
    """Whether the run is trained to its end: its last step, or --stop-early. The same on all ranks."""
    state, plan, patience = session.state, session.components.plan, session.config.train.stop_early
    if state.is_validation_due:
        return False
    epoch, inside = plan.clock.locate(state.step)
    is_stopped_early = patience > 0 and inside == 0 and state.step > 0 and epoch - state.best_epoch >= patience
    return state.step >= plan.last_step or is_stopped_early


def epoch_row(session: TrainingSession) -> dict[str, Any]:
    """Training figures of the epoch so far, including the part that an earlier attempt trained."""
    sums = session.state.epoch_sums
    return {
        "loss": sums.mean_loss,
        **({"accuracy": sums.accuracy} if _has_accuracy(session) else {}),
        "throughput": sums.samples / max(sums.seconds, 1e-9),
        "seconds": sums.seconds,
        "memory_peak_mb": read_memory(session.world.device).peak_mb,
    }


def rank_columns(session: TrainingSession) -> dict[str, list[float]]:
    """Training figures of each rank's own samples in this epoch, in the order of ranks.

    Empty if they are not known: after a resume at the end of an epoch, on another number of ranks, or from a
    checkpoint of an older version.
    """
    rows = session.state.epoch_sums.ranks
    if len(rows) != session.world.world_size:
        return {}
    accuracies = {"accuracy": [correct / max(samples, 1) for _, correct, samples in rows]}
    return {
        "loss": [loss / max(samples, 1) for loss, _, samples in rows],
        **(accuracies if _has_accuracy(session) else {}),
        "samples": [samples for _, _, samples in rows],
    }


def _has_accuracy(session: TrainingSession) -> bool:
    return session.components.plan.info.task != REGRESSION


def _take_step(session: TrainingSession, batch: Batch, lr: float) -> StepReport | None:
    """Compute the gradients, check them, and update. None for a step that is left out."""
    step, state, guards = session.components.step, session.state, session.guards
    if state.step in state.jumped:
        return None
    if guards.faults:
        batch = guards.faults.change_batch(batch, session.components.model.module, state.step + 1)
    report = step.gradients(batch, state.step, wants_stop=_is_stop_due(session))
    if report.is_stop_wanted and _is_saved(session):
        raise StopAgreed  # this step is saved already; one more step would need a second save
    audit_step(session, batch, report)
    fault = find_fault(session, report)
    if fault is not None:
        audit_bad_step(session)
        leave_out(session, batch, fault)
        return None
    guards.enter("update", state.step + 1)
    step.update(state.step, lr, report)
    return report


def _is_stop_due(session: TrainingSession) -> bool:
    stop = session.guards.stop
    if stop.reason is not None and is_end_with_results_wanted():
        return not session.is_ending  # the test and the results are what the caller waits for
    return stop.is_due(session.config.guard.notice_s, _seconds_to_stop(session))


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


def _seconds_to_stop(session: TrainingSession) -> float:
    """An upper estimate of the time for one more step and a save."""
    return 2 * session.checkpoints.last_save_s + 2 * session.guards.watchdog.longest_step_s + 1.0


def end_or_stop(session: TrainingSession) -> None:
    """After an agreed stop: save and return if the caller wants test and results now, else stop the run. Collective."""
    if not is_true_on_any(session.world.is_primary and is_end_with_results_wanted(), session.world):
        stop_run(session)
    session.is_ending = True
    session.console.stop()
    step = session.state.step
    session.console.note(f"ending at step {step}, because the caller asked for it")
    if step > 0 and not _is_saved(session):
        save(session, is_best=False)


def stop_run(session: TrainingSession, *, can_save: bool = True) -> NoReturn:
    """End an agreed stop on every rank: save if needed, write the status, raise Preempted. Collective."""
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
        fields = {"step": step, "reason": reason, "save_s": save_s, **describe_console_loss()}
        session.folder.write_status("preempted" if is_saved else "failed", **fields)
        # Before any rank exits: srun may end the other tasks of a job when the first one exits.
        requeue_job(reason, session.folder.requeues, step)
    wait_for_all(session.world)
    if is_saved:
        command = session.folder.resume_command
        hint = command and f"the same launcher, with {command.removeprefix('paceline ')}"
        raise Preempted(f"stopped at step {step} and saved ({reason})", hint=hint)
    where = None if session.folder.is_temporary else str(session.folder.path)
    raise Preempted(f"stopped at step {step} without a checkpoint of it ({reason})", where=where)


def _log_step(
    session: TrainingSession, sums: torch.Tensor, report: StepReport | None, lr: float, interval: Stopwatch
) -> None:
    """Add up an interval's sums over ranks, and log them. Collective."""
    rows = session.components.step.gather(sums)
    loss, correct, samples, _ = tree_sum(rows).tolist()
    state, last_step = session.state, session.components.plan.last_step
    state.epoch_sums.add(loss, correct, samples)
    lanes = rows[:, :3].view(session.world.world_size, -1, 3)
    state.epoch_sums.add_ranks(lanes.sum(1).tolist())
    session.stragglers.compare(rows[:, 3], state.step)
    if samples == 0 or not session.world.is_primary:
        return  # every step of the interval was left out, with a warning; or the primary writes and prints
    memory = read_memory(session.world.device)
    values = {
        "loss": loss / samples,
        **({"accuracy": correct / samples} if _has_accuracy(session) else {}),
        "lr": lr,
        "throughput": interval.samples_per_s,
        "data_wait": interval.wait_share,
        "memory_mb": memory.now_mb,
        "memory_peak_mb": memory.peak_mb,
        "grad_norm": report.grad_norm if report else 0.0,
    }
    if session.recorder is not None:
        session.recorder.step(state.step, **values)
        _write_status(session)
    session.console.step(state.step, last_step, values)


def _write_status(session: TrainingSession) -> None:
    """Update status.json, at most once a second. A lost run folder is noticed at every call."""
    now = time.monotonic()
    if now - session.status_written_at_s < _STATUS_INTERVAL_S and os.access(session.folder.path, os.W_OK):
        return
    session.status_written_at_s = now
    step, last_step = session.state.step, session.components.plan.last_step
    eta_s = round(session.console.remaining_s(step, last_step), 1)
    save_s = round(session.checkpoints.last_save_s, 3)
    fields = {"step": step, "last_step": last_step, "eta_s": eta_s, "save_s": save_s, **describe_console_loss()}
    session.folder.write_status("running", **fields)


def is_save_due(step: int, clock: EpochClock, last_step: int, run: RunConfig) -> bool:
    """Whether a checkpoint is due after this step: by --save-steps, --save-epochs, or at the end of the run."""
    if step == last_step or (run.save_steps > 0 and step % run.save_steps == 0):
        return True
    epoch, inside = clock.locate(step)
    return inside == 0 and (epoch % run.save_epochs == 0 or _is_kept(epoch, run))


def _is_kept(epoch: int, run: RunConfig) -> bool:
    return run.keep_every_epochs > 0 and epoch % run.keep_every_epochs == 0


def save(session: TrainingSession, *, is_best: bool) -> None:
    """Pass the whole state to the checkpoint manager. Collective."""
    session.guards.enter("save", session.state.step)
    state = session.state
    epoch, inside = session.components.plan.clock.locate(state.step)
    if inside:
        state.validation = None
    keep = inside == 0 and _is_kept(epoch, session.config.run)
    session.checkpoints.save(
        session.components.payload(session.world),
        session.components.state_json(state, keep=keep),
        session.components.about(state),
        is_best=is_best,
    )
