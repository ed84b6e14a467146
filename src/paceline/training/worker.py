"""One rank from start to end: find its place, join the process group, train, and record how it ended."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoints.fetch import prepare_store
from paceline.checkpoints.mirror import mirrored
from paceline.data.reference import is_reference
from paceline.data.registry import describe_dataset, require_used_split
from paceline.errors import (
    EndsWithPrimary,
    OwnerLost,
    PacelineError,
    Preempted,
    UserError,
    explain_exit,
    text_of,
)
from paceline.metrics.safe_output import describe_console_loss, keep_console_in, send_console_to, write_at_once
from paceline.metrics.screen import ScreenLog, say
from paceline.parallel.apply import needs_group
from paceline.parallel.collectives import broadcast_text, gather_texts
from paceline.runs.catalog import recipe_of
from paceline.runs.environment import describe_environment
from paceline.runs.folder import ATTEMPT_MARK, RankLog, RunFolder, write_atomically, write_json
from paceline.runs.local_code import source_read_once
from paceline.runs.members import OWNER_ID, Member, drop_dead_members
from paceline.runs.place import (
    RESUMED_FROM,
    RunPlace,
    claim_place,
    decide_place,
    find_folder_of_job,
    is_same_folder,
    owner_of,
    read_source,
)
from paceline.runs.stores import local_path
from paceline.runs.trust import TRUST_FLAG, sign_code
from paceline.runtime.detect import RankEnvironment, World, identify_job
from paceline.runtime.group import allow_suspension, prepare_rank, process_group
from paceline.runtime.this_rank import leave_error_file, reported_to
from paceline.settings.load import LoadedConfig, to_yaml
from paceline.settings.schema import Config
from paceline.training.guards import Guards, open_guards
from paceline.training.loop import train
from paceline.training.objective import explain_own_code
from paceline.training.rehearse import rehearse
from paceline.training.results import Results, print_result
from paceline.training.same_ranks import require_same_ranks, require_shared_folder
from paceline.training.teacher import name_teacher

_log = logging.getLogger("paceline")


@source_read_once()
def run_worker(loaded: LoadedConfig, environment: RankEnvironment) -> Results:
    """Train as this rank."""
    config = loaded.config
    guards = open_guards(config, environment)
    world = prepare_rank(config.parallel, environment)
    with ExitStack() as held:
        with process_group(world, environment, needed=needs_group(config, world)):
            config = require_same_ranks(name_teacher(config), world)
            loaded = dataclasses.replace(loaded, config=config)
            place = _agree_on_place(loaded, world, environment)
            RunFolder(place.folder).create()
            require_shared_folder(place, world, environment)
            member = _join_owner(RunFolder(place.folder), world, environment, held)
            folder = RunFolder(place.folder, member)
            _open_log(folder, world, environment.attempt)
            record_start = partial(_write_identity, folder, loaded, place, environment, world)
            attempt = environment.attempt
            guards = guards.for_run(config, world, folder, attempt=attempt, record_start=record_start)
            allow_suspension()
            if place.resume_from is None or not is_same_folder(place.folder, owner_of(place.resume_from)):
                guards.record_start()  # a resumed run keeps its files until its checkpoint is accepted
            results = _train_with_status(loaded, world, place, guards)
        guards.close()  # before the upload to a store ends: only the primary waits for it, and it is no hang
    return results


def _train_with_status(loaded: LoadedConfig, world: World, place: RunPlace, guards: Guards) -> Results:
    config = loaded.config
    folder = RunFolder(place.folder, guards.member)
    before = folder.read_status()

    def write_failed(reason: str) -> None:
        if world.is_primary and not folder.keeps_final_status(before):
            with suppress(OSError, OwnerLost):  # the folder may be lost, or owned by another process
                folder.write_status("failed", reason=reason)

    try:
        run = rehearse if config.run.rehearse else train
        try:
            with reported_to(write_failed):
                _check_split_of_function(loaded)
                results = run(config, world, place, guards)
        except Exception as error:
            explained = _explain(error, config, guards)
            if explained is not None:
                raise explained from error
            raise
        except KeyboardInterrupt as error:
            # With Python's own handler it may be Ctrl-C. With ours, Ctrl-C raises nothing.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                raise
            raise explain_exit(error) from error
        except EndsWithPrimary:
            raise
        except BaseException as error:
            raise explain_exit(error) from error
    except Preempted as stopped:
        if not world.is_primary:  # the primary has printed it already
            _log.info("rank %d: %s", world.rank, stopped.what)
        raise
    except BaseException as error:
        what = _reason(error)
        _log.error("rank %d failed: %s", world.rank, what, exc_info=error)
        write_failed(what)
        raise
    if world.is_primary:
        folder.write_status("finished", step=results.steps, **results.for_status(), **describe_console_loss())
        print_result(results, folder)
    return results


def _explain(error: Exception, config: Config, guards: Guards) -> UserError | None:
    """Later steps are not explained: their errors may have causes that a restart ends."""
    if guards.watchdog.longest_step_s == 0:
        return explain_own_code(error, config, "the first step")
    return explain_own_code(error, config, "the evaluation") if guards.watchdog.pulse.phase == "evaluate" else None


def _check_split_of_function(loaded: LoadedConfig) -> None:
    """Only a call of the user's function says whether its data has a validation set."""
    data = loaded.config.data
    if is_reference(data.dataset) and (data.folds or loaded.origin("train_split") == "flag"):
        info = describe_dataset(data, loaded.config.train.seed)  # the function is not called again for the training
        require_used_split(loaded, info.num_validation > 0)


def _reason(error: BaseException) -> str:
    if isinstance(error, PacelineError):
        return error.what
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user"
    return f"{type(error).__name__}: {text_of(error)}"


def _agree_on_place(loaded: LoadedConfig, world: World, environment: RankEnvironment) -> RunPlace:
    """The primary decides, because its clock names the folder. If it fails, all ranks end with its error."""
    answer: dict[str, Any] = {}
    if world.is_primary:
        try:
            before = _folder_of_attempt_before(loaded, environment)
            is_first = before is None and not environment.is_supervised
            claim_store = prepare_store(loaded, say) if is_first else None
            place = decide_place(loaded, restart_in=before)
            if claim_store is not None:
                claim_store()
            place = claim_place(place)
            resume = str(place.resume_from or "")
            answer = {"folder": str(place.folder), "resume_from": resume, "is_restart": place.is_restart}
        except PacelineError as error:
            _broadcast_error(error, world)
            raise
    answer = _receive_answer(answer, world)
    resume = answer["resume_from"]
    return RunPlace(Path(answer["folder"]), Path(resume) if resume else None, answer["is_restart"])


def _broadcast_error(error: PacelineError, world: World) -> None:
    broadcast_text(json.dumps({"exit_code": error.exit_code, "screen": error.screen()}), world)


def _receive_answer(answer: dict[str, Any], world: World) -> dict[str, Any]:
    """The primary's answer on every rank. If the primary has failed instead, this rank ends with it."""
    received: dict[str, Any] = json.loads(broadcast_text(json.dumps(answer), world))
    if "exit_code" in received:
        raise EndsWithPrimary(received["exit_code"], received["screen"])
    return received


def _folder_of_attempt_before(loaded: LoadedConfig, environment: RankEnvironment) -> Path | None:
    """None for the first attempt, and if no earlier attempt has made a folder."""
    if environment.attempt == 1:
        return None
    if environment.is_supervised:  # the supervisor owns the folder and passes its path
        return local_path(loaded.config.run.output_dir)
    return find_folder_of_job(loaded, identify_job())


def _join_owner(folder: RunFolder, world: World, environment: RankEnvironment, held: ExitStack) -> Member:
    """Make this rank a member of the run's owner: of its supervisor, or under another launcher of the primary.

    The ranks of the first node get the owner's id from their supervisor and pass it on. The id is not read from the
    lock file, which may already belong to another owner.
    """
    drop_dead_members(folder.path)  # on this machine, before the primary searches for ranks of an earlier attempt
    given_id = os.environ.get(OWNER_ID, "") if environment.is_supervised else ""
    owner_id = next((text for text in gather_texts(given_id, world) if text), "")
    on_lost = partial(_end_at_once, prints=world.is_primary)
    member = None
    if world.is_primary and not environment.is_supervised:
        try:
            member = held.enter_context(folder.owned(on_lost))
        except PacelineError as error:
            _broadcast_error(error, world)
            raise
        held.enter_context(mirrored(folder))
    if not environment.is_supervised:
        owner_id = _receive_answer({"owner_id": member.id if member is not None else ""}, world)["owner_id"]
    if member is None:
        member = Member(folder.path, owner_id, on_lost)
        member.join()
        held.callback(member.leave)
    return member


def _end_at_once(lost: OwnerLost, *, prints: bool) -> None:
    """End this process. Called by another thread, because the rank may wait in a collective or for a disk."""
    leave_error_file(lost.screen(), lost.exit_code)
    if prints:
        write_at_once(sys.stderr, f"{lost.screen()}\n".encode())
    os._exit(lost.exit_code)


def _open_log(folder: RunFolder, world: World, attempt: int) -> None:
    """Open the log file of this rank. The output of all ranks but the primary goes there, also that of native code."""
    path = folder.log_of(world.rank)
    handler = RankLog(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {world.host} rank {world.rank} %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.info("%s %d", ATTEMPT_MARK, attempt)
    if world.is_primary:
        _log.addHandler(ScreenLog())
        keep_console_in(path, f"paceline cancel {folder.path}")
    else:
        send_console_to(path)


def _write_identity(
    folder: RunFolder, loaded: LoadedConfig, place: RunPlace, environment: RankEnvironment, world: World
) -> None:
    """The primary writes config, environment and status of the run into its folder."""
    if not world.is_primary:
        return
    config = loaded.config
    # An injected fault is not part of the run: a reuse of its config must not repeat it.
    plain = dataclasses.replace(
        config,
        guard=dataclasses.replace(config.guard, inject=""),
        run=dataclasses.replace(config.run, accept_new_data=False),  # accepts one change, once
    )
    # If the recipe is the config.yaml of a run, the name of that run's recipe is recorded.
    is_copy = loaded.recipe_path.name == folder.config.name
    recipe = recipe_of(loaded.recipe_path.parent) if is_copy else loaded.recipe_name
    job = "" if environment.is_supervised else identify_job()
    source = read_source(folder.path, place.resume_from)
    record = {"recipe": recipe, "job": job, **({RESUMED_FROM: source} if source else {}), **describe_environment()}
    # Before config.yaml, which makes the folder a run: the same command must find what the run was started from.
    write_json(folder.environment, record)
    write_atomically(folder.config, to_yaml(plain, loaded.settings))
    unsigned = sign_code(folder.path, plain)
    if unsigned:
        _log.info("note: evaluate, predict and export will ask for %s: %s", TRUST_FLAG, unsigned)
    folder.write_status("running", step=0, attempt=environment.attempt)
