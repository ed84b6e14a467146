"""What a ride is made of on this rank, opened in order: run folder, checkpoints, starting point, recorder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.checkpoints.best import adopt_best
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention
from paceline.config.fields import flatten
from paceline.config.schema import Config
from paceline.metrics.console import Console
from paceline.metrics.recorder import Recorder, inherit_rows
from paceline.runs.folder import RunFolder, write_json
from paceline.runs.mirror_note import read_own_note
from paceline.runs.patience import read_patiently
from paceline.runs.place import RunPlace, owner_of
from paceline.training.guards import Guards
from paceline.training.narrate import describe_run
from paceline.training.rig import Rig, build_rig
from paceline.training.state import TrainState
from paceline.training.stragglers import Stragglers
from paceline.world.detect import World
from paceline.world.garbage import no_search_for_garbage


@dataclass
class Ride:
    """What the chapters below pass on to each other."""

    config: Config
    world: World
    folder: RunFolder
    rig: Rig
    state: TrainState
    checkpoints: CheckpointManager
    recorder: Recorder | None  # the primary's
    console: Console
    eval_batches: int | None  # a rehearsal looks at a few batches only
    guards: Guards
    place: RunPlace
    stragglers: Stragglers
    is_leaving: bool = False  # the ranks have agreed to stop
    status_told_at: float = 0.0  # by the monotonic clock
    rollbacks: dict[int, int] = field(default_factory=dict)  # how often the run went back to which checkpoint


def open_ride(config: Config, world: World, place: RunPlace, guards: Guards, *, eval_batches: int | None) -> Ride:
    """Build everything, and start fresh or where an earlier attempt stopped."""
    with no_search_for_garbage():
        rig = build_rig(config, world)
    rig.step.guards = guards
    console = Console(
        is_speaking=world.is_primary,
        metric_lines=config.run.metric_lines,
        clock=rig.plan.clock,
        epochs=config.train.epochs,
    )
    folder = RunFolder(place.folder, guards.member)
    checkpoints = _open_checkpoints(config, folder, rig, world)
    state, resumed_from = _resume_or_start(config, world, place, rig, checkpoints)
    # After the resume: the checkpoint may have decided which samples are trained on.
    for line in describe_run(rig, world, place):
        console.note(line)
    note = read_own_note(place.folder)
    if note is not None:
        console.note(f"store     {note.url}, mirrored beside training")
    if resumed_from is not None:
        where = resumed_from.name if folder.is_temporary else resumed_from
        console.note(f"resumed   at step {state.step} from {where}")
    guards.begin()
    rig.samples = None  # on a GPU, the copy in the host's memory may go
    console.clock = rig.plan.clock  # other data may have other epochs
    if world.is_primary:
        write_json(folder.data, {**rig.data.to_json(), "held_out": None})
    checkpoints.branch_at(state.step)
    recorder = _open_recorder(config, folder, place, state) if world.is_primary else None
    if guards.faults:
        checkpoints.before_write = guards.faults.before_write
    guards.enter("start", state.step)
    watch = Stragglers(world)
    return Ride(config, world, folder, rig, state, checkpoints, recorder, console, eval_batches, guards, place, watch)


def reopen_recorder(ride: Ride) -> None:
    """The run went back: rows after its step are cut off."""
    if ride.recorder is not None:
        ride.recorder.close()
        ride.recorder = _open_recorder(ride.config, ride.folder, ride.place, ride.state)


def _open_checkpoints(config: Config, folder: RunFolder, rig: Rig, world: World) -> CheckpointManager:
    manager = CheckpointManager(
        folder.checkpoints,
        world,
        is_sharded=rig.model.strategy == "fsdp" and world.world_size > 1,
        retention=Retention(config.run.keep_last, config.run.keep_best),
        is_async=config.run.async_save,
        flushed_first=(folder.metrics_jsonl, folder.status, folder.path),
        require_owner=folder.require_owner,
    )
    manager.warn_if_space_is_short(rig.checkpoint_bytes())
    return manager


def _resume_or_start(
    config: Config, world: World, place: RunPlace, rig: Rig, checkpoints: CheckpointManager
) -> tuple[TrainState, Path | None]:
    """The state, and the checkpoint it comes from."""
    checkpoint = None
    if place.resume_from is not None:
        prefer_best = config.run.best_is_latest and not place.is_restart
        checkpoint = checkpoints.choose(place.resume_from, prefer_best=prefer_best)
    if checkpoint is None:
        checkpoints.begin_at_zero(place.resume_from, may_drop_damaged=config.run.start_over_if_damaged)
        return TrainState(), None
    state = rig.resume(checkpoint, world)
    if checkpoint.path.parent.resolve() == RunFolder(place.folder).checkpoints.resolve():
        checkpoints.stands_at(state.step)
    if world.is_primary:
        own = RunFolder(place.folder).checkpoints
        read_patiently("pointing best", own, lambda: adopt_best(checkpoint.path.parent, own, state.best_step))
    return state, checkpoint.path


def _open_recorder(config: Config, folder: RunFolder, place: RunPlace, state: TrainState) -> Recorder:
    if place.resume_from is not None:
        inherit_rows(RunFolder(owner_of(place.resume_from)), folder)
    recorder = Recorder(folder, resume_step=state.step, is_validation_due=state.is_validation_due)
    recorder.open_trackers(config.run.track, flatten(config))
    return recorder
