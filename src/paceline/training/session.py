"""The training session of a rank, opened in order: components, run folder, checkpoints, starting point, recorder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.checkpoints.best import adopt_best
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention
from paceline.metrics.console import Console
from paceline.metrics.recorder import Recorder, inherit_rows
from paceline.runs.folder import RunFolder, write_json
from paceline.runs.mirror_note import read_own_note
from paceline.runs.patience import read_patiently
from paceline.runs.place import RunPlace, owner_of
from paceline.runtime.detect import World
from paceline.runtime.garbage import no_search_for_garbage
from paceline.settings.fields import flatten
from paceline.settings.schema import Config
from paceline.training.components import Components, build_components
from paceline.training.guards import Guards
from paceline.training.run_summary import describe_run
from paceline.training.state import TrainState
from paceline.training.stragglers import Stragglers


@dataclass
class TrainingSession:
    """What the chapters below pass on to each other."""

    config: Config
    world: World
    folder: RunFolder
    components: Components
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


def open_session(
    config: Config, world: World, place: RunPlace, guards: Guards, *, eval_batches: int | None
) -> TrainingSession:
    """Build everything, and start fresh or where an earlier attempt stopped."""
    with no_search_for_garbage():
        components = build_components(config, world)
    components.step.guards = guards
    console = Console(
        is_enabled=world.is_primary,
        metric_lines=config.run.metric_lines,
        clock=components.plan.clock,
        epochs=config.train.epochs,
    )
    folder = RunFolder(place.folder, guards.member)
    checkpoints = _open_checkpoints(config, folder, components, world)
    state, resumed_from = _resume_or_start(config, world, place, components, checkpoints)
    # After the resume: the checkpoint may have decided which samples are trained on.
    for line in describe_run(components, world, place):
        console.note(line)
    note = read_own_note(place.folder)
    if note is not None:
        console.note(f"store     {note.url}, mirrored beside training")
    if resumed_from is not None:
        where = resumed_from.name if folder.is_temporary else resumed_from
        console.note(f"resumed   at step {state.step} from {where}")
    guards.begin()
    components.samples = None  # on a GPU, the copy in the host's memory may go
    console.clock = components.plan.clock  # other data may have other epochs
    if world.is_primary:
        write_json(folder.data, {**components.data.to_json(), "held_out": None})
    checkpoints.branch_at(state.step)
    recorder = _open_recorder(config, folder, place, state) if world.is_primary else None
    if guards.faults:
        checkpoints.before_write = guards.faults.before_write
    guards.enter("start", state.step)
    watch = Stragglers(world)
    return TrainingSession(
        config, world, folder, components, state, checkpoints, recorder, console, eval_batches, guards, place, watch
    )


def reopen_recorder(session: TrainingSession) -> None:
    """The run went back: rows after its step are cut off."""
    if session.recorder is not None:
        session.recorder.close()
        session.recorder = _open_recorder(session.config, session.folder, session.place, session.state)


def _open_checkpoints(config: Config, folder: RunFolder, components: Components, world: World) -> CheckpointManager:
    manager = CheckpointManager(
        folder.checkpoints,
        world,
        is_sharded=components.model.strategy == "fsdp" and world.world_size > 1,
        retention=Retention(config.run.keep_last, config.run.keep_best),
        is_async=config.run.async_save,
        flushed_first=(folder.metrics_jsonl, folder.status, folder.path),
        require_owner=folder.require_owner,
    )
    manager.warn_if_space_is_short(components.checkpoint_bytes())
    return manager


def _resume_or_start(
    config: Config, world: World, place: RunPlace, components: Components, checkpoints: CheckpointManager
) -> tuple[TrainState, Path | None]:
    """The state, and the checkpoint it comes from."""
    checkpoint = None
    if place.resume_from is not None:
        prefer_best = config.run.best_is_latest and not place.is_restart
        checkpoint = checkpoints.choose(place.resume_from, prefer_best=prefer_best)
    if checkpoint is None:
        checkpoints.begin_at_zero(place.resume_from, may_drop_damaged=config.run.start_over_if_damaged)
        return TrainState(), None
    state = components.resume(checkpoint, world)
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
