"""Takes steps of a finished run again, in this process, with the code of the training loop.

One rank runs all lanes of an exact run, which gives the same bits as its ranks. A run without --exact on several ranks
runs with one lane per rank: the same arithmetic, but its sums are rounded in another order. It only reads the
run folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from paceline.checkpoints.capture import Tensors, gather_whole, model_tensors, optimizer_tensors
from paceline.checkpoints.format import step_folders, step_of
from paceline.checkpoints.ledger import hash_tensors
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Checkpoint, Retention, open_checkpoint
from paceline.data.known_files import require_data_folder
from paceline.data.loader import Batch
from paceline.errors import CheckpointError, UserError
from paceline.metrics.console import Console
from paceline.runs.folder import RunFolder, require_run_folder
from paceline.runs.json_files import Number, fit
from paceline.runs.place import RunPlace
from paceline.runs.trust import require_trusted_code
from paceline.runtime.detect import ALONE, build_world
from paceline.settings.load import LoadedConfig, load_config, load_saved
from paceline.settings.rules import check_config
from paceline.settings.schema import Config, flatten
from paceline.settings.small_files import read_json_object
from paceline.settings.values import Setting
from paceline.training.bad_numbers import RollBack
from paceline.training.components import Components, build_components
from paceline.training.epoch import take_steps
from paceline.training.guards import Guards, Stragglers
from paceline.training.session import TrainingSession
from paceline.training.state import TrainState

_THREADS, _RANKS = Number(0, 1024, is_whole=True), Number(1, 2**20, is_whole=True)


@dataclass(frozen=True)
class ReplayedStep:
    step: int  # the first is 1
    batch: Batch  # the global batch, in the order of ranks and lanes
    lr: float
    loss: float  # mean over the global batch; NaN for a step that is left out
    grad_norm: float  # before clipping; NaN for a step that is left out

    @property
    def ids(self) -> Tensor:
        return self.batch.ids

    @property
    def is_left_out(self) -> bool:
        return self.loss != self.loss


@dataclass(frozen=True)
class RanksOfRun:
    """How a run was trained. It decides whether one rank can give the same bits."""

    ranks: int
    lanes: int
    threads: int  # of each rank; 0 if it is not recorded
    is_exact: bool

    @property
    def can_give_same_bits(self) -> bool:
        return self.is_exact or self.ranks == 1


class Replay:
    """A run whose steps are taken again. A context manager: it has a temporary folder.

    `start_at` restores a stored checkpoint (0: the initial weights). `steps` then takes steps one by one. Between two
    steps, and in `before_update`, the live objects can be examined: `components`, `weights_sha256`, `gradients`.
    """

    def __init__(self, run: Path, flags: Sequence[str | Setting] = ()) -> None:
        """`flags`: of `paceline train`. They override the settings of the run, for example --data-dir or --device."""
        require_run_folder(run)
        self.run = run
        self.stored = {step_of(path): path for path in sorted(step_folders(run / "checkpoints"), key=step_of)}
        self.before_update: Callable[[], None] | None = None  # called with the gradients of the step, before clipping
        self._flags = list(flags)
        self._session: TrainingSession | None = None
        self.trained = RanksOfRun(1, 1, 0, is_exact=False)  # how the run took the steps after `start_at`
        self._held = ExitStack()
        self._folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="paceline-replay-")))

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        self._held.close()

    @property
    def session(self) -> TrainingSession:
        assert self._session is not None, "start_at comes first"
        return self._session

    @property
    def components(self) -> Components:
        return self.session.components

    @property
    def has_batches_of_run(self) -> bool:
        """Whether BatchNorm sees the same samples together as in the run. Call this after `start_at`."""
        parallel = self.session.config.parallel
        is_same = parallel.exact or parallel.sync_bn or self.trained.ranks == 1
        kind = torch.nn.modules.batchnorm._BatchNorm
        return is_same or not any(isinstance(module, kind) for module in self.components.model.module.modules())

    @property
    def step(self) -> int:
        """Steps taken so far, by the count of the run."""
        return self.session.state.step

    def nearest_start(self, step: int) -> int:
        """The last step before this one that a replay can start after: of a stored checkpoint, or 0."""
        return max((stored for stored in self.stored if stored < step), default=0)

    def start_at(self, step: int, flags: Sequence[str | Setting] = ()) -> None:
        """Restore the checkpoint of this step, or make the initial weights. `flags` override settings, as above."""
        checkpoint = self._open(step) if step else None
        end = self._open_end(step)
        loaded = self._load_config(end, flags)
        self.trained = self._ranks_of(loaded.config, end or checkpoint)
        config = self._on_one_rank(loaded.config, self.trained)
        if checkpoint is not None:
            config = replace(config, run=replace(config.run, init_from=""))  # the checkpoint replaces these weights
            # The settings are those of the steps after it, with the flags of the caller.
            checkpoint = replace(checkpoint, state={**checkpoint.state, "config": flatten(config)})
        world = build_world(config.parallel, ALONE)
        torch.set_num_threads(world.threads)
        guards = Guards(observers=[self._observe])
        components = build_components(config, world, guards, checkpoint=checkpoint)
        state = components.resume(checkpoint, world) if checkpoint is not None else TrainState()
        if end is not None:  # a roll-back after this checkpoint has left steps out
            state.jumped = sorted({*state.jumped, *TrainState.from_json(end.state).jumped})
        folder = RunFolder(self._folder)
        manager = CheckpointManager(
            folder.checkpoints, world, is_sharded=False, retention=Retention(), is_async=False
        )  # the loop asks it when a save takes place; it saves nothing here
        self._session = TrainingSession(
            config=config,
            world=world,
            folder=folder,
            components=components,
            state=state,
            checkpoints=manager,
            recorder=None,
            console=Console(is_enabled=False),
            eval_batches=None,
            guards=guards,
            place=RunPlace(self._folder, None),
            stragglers=Stragglers(world),
        )

    def steps(self, until: int) -> Iterator[ReplayedStep]:
        """Take steps up to this one, in the order of the run."""
        session = self.session
        clock, last_step = self.components.plan.clock, self.components.plan.last_step
        if until > last_step:
            raise UserError(
                "the run does not have this step", where=str(self.run), got=until, allowed=f"1 to {last_step}"
            )
        while session.state.step < until:
            epoch, _ = clock.locate(session.state.step)
            try:
                for taken in take_steps(session, min(until, clock.end_of(epoch + 1))):
                    report = taken.report
                    loss, norm = (report.mean_loss, report.grad_norm) if report else (float("nan"), float("nan"))
                    yield ReplayedStep(self.step, taken.batch, taken.lr, loss, norm)
            except RollBack as cause:
                raise CheckpointError(
                    "the replay meets a bad step that the run does not record",
                    where=str(self.run),
                    got=cause,
                    hint="the run had other numbers here: another machine or torch, or --inject",
                ) from cause

    def weights(self) -> Tensors:
        """A copy of everything in the model's state, on the CPU."""
        return gather_whole(model_tensors(self.components.model.module), "cpu")

    def hashes(self) -> dict[str, str]:
        """SHA-256 of model, optimizer and moving average, as the run records them of its checkpoints."""
        components = self.components
        module = components.model.module
        parts = {"model": model_tensors(module), "optimizer": optimizer_tensors(module, components.optimizer)}
        if components.average is not None:
            parts["ema"] = components.average_values()
        return {kind: hash_tensors(gather_whole(tensors, "cpu")) for kind, tensors in parts.items()}

    def gradients(self) -> Tensors:
        """The gradients by parameter, during `before_update`."""
        named = self.components.model.module.named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def _ranks_of(self, config: Config, checkpoint: Checkpoint | None) -> RanksOfRun:
        ranks, threads = 1, 0
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):  # the run may not have ended
            entries = read_json_object(RunFolder(self.run).results)["process_metrics"]
            ranks, threads = len(entries), fit(entries[0]["threads"], _THREADS)
        if checkpoint is not None:
            ranks = 1
            with suppress(ValueError):  # the folder may be a stranger's
                ranks = fit(checkpoint.manifest.about.get("world_size"), _RANKS)
        return RanksOfRun(ranks, config.parallel.lanes or ranks, threads, config.parallel.exact)

    def _observe(self, phase: str, step: int) -> None:
        if phase == "update" and self.before_update is not None:
            self.before_update()

    def _open(self, step: int) -> Checkpoint:
        if step not in self.stored:
            allowed = ", ".join(map(str, [0, *self.stored]))
            raise UserError("the run has no checkpoint of this step", where=str(self.run), got=step, allowed=allowed)
        return open_checkpoint(self.stored[step])

    def _open_end(self, step: int) -> Checkpoint | None:
        """The next stored checkpoint after a step. Its settings are those of the steps before it."""
        later = [stored for stored in self.stored if stored > step]
        return self._open(min(later) if later else max(self.stored)) if self.stored else None

    def _load_config(self, end: Checkpoint | None, flags: Sequence[str | Setting]) -> LoadedConfig:
        given = [*self._flags, *flags]
        if end is None:
            loaded = load_config(str(RunFolder(self.run).config), given)
        else:
            loaded = load_saved(end.state["config"], end.path / "state.json", given)
        check_config(loaded)
        require_trusted_code(self.run, loaded.config)
        hint = "--data-dir PATH names the folder of its data"
        require_data_folder(loaded.config.data, where="--data-dir", hint=hint)
        return loaded

    def _on_one_rank(self, config: Config, trained: RanksOfRun) -> Config:
        """The same run on one rank: with one lane for each lane, or for each rank, of the run."""
        parallel = config.parallel
        is_in_lanes = trained.is_exact or (trained.ranks > 1 and not parallel.sync_bn)
        if is_in_lanes and trained.lanes.bit_count() == 1:  # lanes are summed in a binary tree
            parallel = replace(parallel, exact=True, lanes=trained.lanes)
        elif trained.ranks == 1:
            parallel = replace(parallel, omp_num_threads=trained.threads)  # they decide the order of sums
        parallel = replace(parallel, strategy="single", processes="1", cpu_offload=False)
        guard = replace(config.guard, audit="")  # a replay is a recomputation itself
        return replace(config, parallel=parallel, run=replace(config.run, profile=False), guard=guard)


def gradient_hashes(replay: Replay) -> dict[str, str]:
    """SHA-256 of each gradient, during `before_update`."""
    return {name: hash_tensors({name: value.detach().cpu()}) for name, value in replay.gradients().items()}
