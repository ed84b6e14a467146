"""The training session of a rank, opened in this order: checkpoints, components, starting point, header, recorder."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.checkpoints.ledger import Ledger
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.resume import adopt_best
from paceline.checkpoints.store import Checkpoint, Retention
from paceline.metrics.console import Console
from paceline.metrics.recorder import Recorder, inherit_rows
from paceline.parallel.apply import num_shards, resolve_strategy
from paceline.runs.folder import RunFolder, write_json
from paceline.runs.patience import read_patiently
from paceline.runs.place import RunPlace, owner_of
from paceline.runs.stores import read_own_note
from paceline.runtime.detect import World
from paceline.runtime.memory import no_search_for_garbage
from paceline.settings.schema import SHARDED, Config, flatten
from paceline.settings.tasks import best_metric
from paceline.training.audit_plan import require_alike
from paceline.training.components import Components, build_components
from paceline.training.guards import Guards, Stragglers
from paceline.training.header import describe_run
from paceline.training.state import TrainState


@dataclass
class TrainingSession:
    """Everything that training uses. The loop and its parts pass it to each other."""

    config: Config
    world: World
    folder: RunFolder
    components: Components
    state: TrainState
    checkpoints: CheckpointManager
    recorder: Recorder | None  # None on all ranks but the primary
    console: Console
    eval_batches: int | None  # a rehearsal evaluates a few batches only
    guards: Guards
    place: RunPlace
    stragglers: Stragglers
    is_stopping: bool = False  # the ranks have agreed to stop
    is_ending: bool = False  # all steps are done, or the caller wants the results now
    status_written_at_s: float = 0.0  # by the monotonic clock
    rollbacks: dict[int, int] = field(default_factory=dict)  # how often the run went back to which checkpoint


def open_session(
    config: Config, world: World, place: RunPlace, guards: Guards, *, eval_batches: int | None
) -> TrainingSession:
    """Build everything, and start at step 0 or where an earlier attempt stopped. Collective."""
    folder = RunFolder(place.folder, guards.member)
    checkpoints = _open_checkpoints(config, folder, world, guards)
    checkpoint = _choose_checkpoint(config, place, checkpoints)
    with no_search_for_garbage():
        components = build_components(config, world, guards, checkpoint=checkpoint)
    require_alike(config, world)
    checkpoints.warn_if_space_is_short(components.checkpoint_bytes())
    state = TrainState()
    if checkpoint is not None:
        state = components.resume(checkpoint, world)
        _take_over(checkpoint, state, folder, checkpoints, world)
    own_metrics = (name.rpartition(":")[2] for name in config.train.metrics)
    console = Console(
        is_enabled=world.is_primary,
        metric_lines=config.run.metric_lines,
        clock=components.plan.clock,
        epochs=config.train.epochs,
        shown_metrics=tuple(dict.fromkeys([best_metric(config)[0], *own_metrics])),
    )
    _print_header(console, components, world, place, checkpoint)
    guards.record_start()
    if world.is_primary:
        write_json(folder.data, {**components.data.to_json(), "held_out": None})
    checkpoints.branch_at(state.step)
    recorder = _open_recorder(config, folder, place, state) if world.is_primary else None
    guards.enter("start", state.step)
    return TrainingSession(
        config=config,
        world=world,
        folder=folder,
        components=components,
        state=state,
        checkpoints=checkpoints,
        recorder=recorder,
        console=console,
        eval_batches=eval_batches,
        guards=guards,
        place=place,
        stragglers=Stragglers(world),
    )


def reopen_recorder(session: TrainingSession) -> None:
    """The run went back to an earlier step: cut off the rows after it."""
    if session.recorder is not None:
        session.recorder.close()
        session.recorder = _open_recorder(session.config, session.folder, session.place, session.state)


def _open_checkpoints(config: Config, folder: RunFolder, world: World, guards: Guards) -> CheckpointManager:
    strategy = resolve_strategy(config, world.world_size)
    return CheckpointManager(
        folder.checkpoints,
        world,
        is_sharded=strategy in SHARDED and world.world_size > 1,
        num_shards=num_shards(strategy, world),
        retention=Retention(config.run.keep_last, config.run.keep_best),
        is_async=config.run.async_save,
        flushed_first=(folder.metrics_jsonl, folder.steps, folder.status, folder.path),
        require_owner=folder.require_owner,
        before_write=guards.faults.before_write if guards.faults else None,
        ledger=Ledger(folder.ledger) if world.is_primary else None,
    )


def _choose_checkpoint(config: Config, place: RunPlace, checkpoints: CheckpointManager) -> Checkpoint | None:
    """The checkpoint to continue from; None to start at step 0. Collective."""
    checkpoint = None
    if place.resume_from is not None:
        prefer_best = config.run.best_is_latest and not place.is_restart
        checkpoint = checkpoints.choose(place.resume_from, prefer_best=prefer_best)
    if checkpoint is None:
        checkpoints.begin_at_zero(place.resume_from, may_drop_damaged=config.run.start_over_if_damaged)
    return checkpoint


def _take_over(
    checkpoint: Checkpoint, state: TrainState, folder: RunFolder, checkpoints: CheckpointManager, world: World
) -> None:
    """Continue from a checkpoint of this folder, or copy the best checkpoint of another run into this folder."""
    source = checkpoint.path.parent
    if source.resolve() == folder.checkpoints.resolve():
        checkpoints.stands_at(state.step)
    if world.is_primary:
        own = folder.checkpoints
        read_patiently("pointing best", own, lambda: adopt_best(source, own, state.best_step))
        Ledger(folder.ledger).take_over(checkpoint, RunFolder(owner_of(checkpoint.path)).ledger)


def _print_header(
    console: Console, components: Components, world: World, place: RunPlace, checkpoint: Checkpoint | None
) -> None:
    for line in describe_run(components, world, place):
        console.note(line)
    note = read_own_note(place.folder)
    if note is not None:
        console.note(f"store     {note.url}, mirrored beside training")
    if checkpoint is not None:
        where = checkpoint.path.name if RunFolder(place.folder).is_temporary else checkpoint.path
        console.note(f"resumed   at step {checkpoint.step} from {where}")


def _open_recorder(config: Config, folder: RunFolder, place: RunPlace, state: TrainState) -> Recorder:
    if place.resume_from is not None:
        inherit_rows(RunFolder(owner_of(place.resume_from)), folder)
    recorder = Recorder(folder, resume_step=state.step, is_validation_due=state.is_validation_due)
    recorder.open_trackers(config.run.track, flatten(config))
    return recorder
