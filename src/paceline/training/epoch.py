"""One epoch of training: batches in, updates out, and now and then a line about it."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import NonFiniteError
from paceline.metrics.throughput import Stopwatch, read_memory
from paceline.parallel.collectives import sum_lanes
from paceline.training.ride import Ride
from paceline.training.state import EpochSums


def train_epoch(ride: Ride, run_watch: Stopwatch) -> dict[str, Any]:
    """Train to the end of the current epoch, or of the run; returns the epoch's train row."""
    config, rig, state, plan = ride.config, ride.rig, ride.state, ride.rig.plan
    epoch, first_step = divmod(state.step, plan.steps_per_epoch)
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
    for batch in batches:
        lr = plan.learning_rate(state.step)
        is_last = state.step + 1 in (plan.last_step, (epoch + 1) * plan.steps_per_epoch)
        is_saved = config.run.save_steps > 0 and (state.step + 1) % config.run.save_steps == 0 and not is_last
        is_logged = (state.step + 1) % config.run.log_frequency == 0 or is_last or is_saved
        report = rig.step(batch, state.step, lr, want_norm=is_logged)
        state.step += 1
        sums += report.sums
        for watch in (interval, epoch_watch, run_watch):
            watch.count(config.train.global_batch_size, batch.wait_s)
        if is_logged:
            _log_step(ride, sums, report.grad_norm, lr, interval)
            sums.zero_()
            interval.restart()
        if is_saved:
            state.epoch_sums.seconds += epoch_watch.seconds
            epoch_watch.restart()
            save(ride, is_best=False)
        if state.step == plan.last_step:
            break
    state.epoch_sums.seconds += epoch_watch.seconds
    return {
        "loss": state.epoch_sums.mean_loss,
        "accuracy": state.epoch_sums.accuracy,
        "throughput": state.epoch_sums.samples / state.epoch_sums.seconds,
        "seconds": state.epoch_sums.seconds,
        "memory_peak_mb": read_memory(ride.world.device).peak_mb,
    }


def _log_step(ride: Ride, sums: torch.Tensor, norm: torch.Tensor | None, lr: float, interval: Stopwatch) -> None:
    """Bring an interval's sums to the host: the only moment the loop waits for the device."""
    norm = norm if norm is not None else sums.new_zeros(())
    total = sum_lanes(sums, ride.world)
    loss, correct, samples, grad_norm = torch.cat([total, norm.to(total).reshape(1)]).tolist()
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


def save(ride: Ride, *, is_best: bool) -> None:
    """Hand the whole state to the checkpoint manager. Collective."""
    state, every = ride.state, ride.config.run.save_frequency
    epoch, inside = divmod(state.step, ride.rig.plan.steps_per_epoch)
    if inside:
        state.validation = None
    keep = every > 0 and inside == 0 and epoch % every == 0
    ride.checkpoints.save(
        ride.rig.payload(ride.world),
        ride.rig.state_json(state, keep=keep),
        ride.rig.about(state),
        is_best=is_best,
    )
