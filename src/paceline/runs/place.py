"""Which folder a run writes to, and what it resumes from. One process decides this, once."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.folder import (
    CHECKPOINT_MARK,
    RUNS,
    RunFolder,
    flush,
    has_checkpoint,
    unwritable_folder,
)
from paceline.runs.json_files import ENVIRONMENT, read_object
from paceline.runs.patience import is_present, names_in, read_patiently
from paceline.runs.stores import local_path
from paceline.settings.load import LoadedConfig

_STAMP = re.compile(r"-(?P<time>[0-9]{8}-[0-9]{6})(-(?P<number>[0-9]{1,9}))?$")
_LONGEST_NAME_INSIDE = "checkpoints/.mirror/replaced-step-00000000/model-00000-of-00000.safetensors.0000000.tmp"
RESUMED_FROM = "resumed_from"  # in environment.json


# Names of new run folders: `runs/<recipe>-<date>-<time>`, with `-02`, `-03`, ... if the second is taken.


def propose_run_folder(name: str) -> Path:
    """A folder name that is free now. Nothing is created, so another run may take it."""
    return next(path for path in _candidates(name) if not path.exists())


def claim_run_folder(name: str) -> Path:
    """Create a new folder for one run. mkdir is atomic, so concurrent processes get different folders."""
    path = RUNS
    try:
        for path in _candidates(name):
            with suppress(FileExistsError):
                _make(path)
                return path
    except OSError as error:
        raise unwritable_folder(path, error) from error
    raise AssertionError("unreachable")


def release_run_folder(path: Path) -> None:
    """Remove a claimed folder if nothing was written into it, and `runs` if it is empty."""
    with suppress(OSError):
        path.rmdir()
        RUNS.rmdir()


def _candidates(name: str) -> Iterator[Path]:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    yield RUNS / stem
    number = 2
    while True:
        yield RUNS / f"{stem}-{number:02}"  # two digits, so that sorting by name sorts by age
        number += 1


def _make(path: Path) -> None:
    """Raises FileExistsError if another run has this name."""
    while True:
        try:
            path.mkdir()
        except FileNotFoundError:  # no `runs` yet, or another process has just removed it
            try:
                RUNS.mkdir()
            except FileExistsError:
                if not RUNS.is_dir():
                    raise NotADirectoryError(20, "runs is not a folder") from None
            else:
                flush(RUNS.parent)  # a checkpoint is durable only if all its parent folders are
        else:
            return


def newest_run_folder(recipe_name: str) -> Path | None:
    """The newest run of this recipe that has a checkpoint.

    The name must be exactly `<recipe>-<time>`: a recipe `sweep` does not match runs of `sweep-3`. A folder that
    records another recipe is skipped.
    """
    # If a run's config.yaml is used as the recipe, its name is the run's name. The new run records the first recipe.
    recipes = (recipe_name, _STAMP.sub("", recipe_name))
    names = read_patiently("looking for runs", RUNS, lambda: names_in(RUNS))
    stamps = {name: _STAMP.fullmatch(name.removeprefix(recipe_name)) for name in names if name.startswith(recipe_name)}
    runs = [(stamp["time"], int(stamp["number"] or 1), RUNS / name) for name, stamp in stamps.items() if stamp]
    for _, _, path in sorted(runs, reverse=True):
        recorded = read_object(path / "environment.json", ENVIRONMENT).get("recipe", recipe_name)
        if recorded in recipes and has_checkpoint(path):
            return path
    return None


@dataclass(frozen=True)
class RunPlace:
    folder: Path
    resume_from: Path | None  # a run folder or a checkpoint in one
    is_restart: bool = False  # another attempt of the same run, in its folder
    new_name: str = ""  # set for a new run: `folder` is only a proposal until it is claimed


def decide_place(loaded: LoadedConfig, *, restart_in: Path | None = None) -> RunPlace:
    """Turn output_dir and resume into paths of this machine; nothing is created yet (`claimed` does that).

    For a URL, the path is the working copy. `checkpoints.mirror` has already fetched the contents of the store.
    restart_in: the folder of an earlier attempt of the same job.
    """
    run = loaded.config.run
    given = local_path(run.output_dir, loaded.where("output_dir")) if run.output_dir else None
    if given is not None:
        read_patiently("looking for the run", given, lambda: is_present(given) and is_present(given / "checkpoints"))
    if restart_in is not None:
        return _place_for_restart(loaded, restart_in)
    if given is not None and given.exists() and not given.is_dir():
        raise UserError(
            "output_dir is a file",
            where=loaded.where("output_dir"),
            got=run.output_dir,
            hint="--output-dir with the path of a folder, which need not exist",
        )
    if starts_anew(loaded):
        if given is None:
            return new_place(loaded)
        if RunFolder(given).holds_a_run:
            raise _already_holds_a_run(given)
        _refuse_files_of_others(given)
        return RunPlace(given, None)
    if run.resume == "auto":
        return _place_for_auto(loaded, given)
    source = local_path(run.resume, loaded.where("resume"))
    if not has_checkpoint(source):
        raise UserError(
            "there is nothing to resume from: no checkpoint here",
            where=loaded.where("resume"),
            got=run.resume,
            allowed="auto, a run folder, or one of its checkpoints/step-*, latest or best",
        )
    if given is None or is_same_folder(given, owner_of(source)):
        return RunPlace(given or owner_of(source), source)
    return _place_for_continuation(given, source)


def starts_anew(loaded: LoadedConfig) -> bool:
    """Whether the run starts without a checkpoint.

    In `train RUN/config.yaml --resume auto`, the load policy in the file applied to the first start of that run.
    """
    run = loaded.config.run
    if run.resume != "auto" or run.load_policy != "none":
        return not run.resume
    is_own = loaded.recipe_path.name == "config.yaml" and has_checkpoint(loaded.recipe_path.parent)
    return not is_own or loaded.origin("resume") != "flag" or loaded.origin("load_policy") == "flag"


def new_place(loaded: LoadedConfig, source: Path | None = None, *, prefix: str = "") -> RunPlace:
    """A new run in a folder whose name we choose."""
    name = prefix + loaded.recipe_name + ("-rehearsal" if loaded.config.run.rehearse else "")
    return RunPlace(propose_run_folder(name), source, new_name=name)


def claim_place(place: RunPlace) -> RunPlace:
    """Create the folder of a run that gets a new name. No other run gets this folder."""
    if not place.new_name:
        return place
    return dataclasses.replace(place, folder=claim_run_folder(place.new_name), new_name="")


@contextmanager
def claimed(place: RunPlace) -> Iterator[RunPlace]:
    """Like `claim_place`, but if the block fails, remove the created folder if it is empty."""
    result = claim_place(place)
    try:
        yield result
    except BaseException:
        if place.new_name:
            release_run_folder(result.folder)
        raise


def _place_for_continuation(folder: Path, source: Path) -> RunPlace:
    """A run in its own folder that starts from the checkpoint of another run.

    If the same command is repeated after a stop, it resumes that run. The folder of any other run is refused: its
    checkpoints would be replaced by those of the source.
    """
    if not RunFolder(folder).holds_a_run:
        _refuse_files_of_others(folder)
        return RunPlace(folder, source)
    recorded = read_object(RunFolder(folder).environment, ENVIRONMENT).get(RESUMED_FROM, "")
    named = {recorded, str(owner_of(Path(recorded)))} if recorded else set()
    if describe_source(source) not in named:
        raise _already_holds_a_run(folder)
    return RunPlace(folder, folder if has_checkpoint(folder) else source)


def _refuse_files_of_others(folder: Path) -> None:
    found = RunFolder(folder).files_of_others
    if found:
        raise UserError(
            "this folder holds other files, which the run would overwrite",
            where=str(folder),
            got=", ".join(found[:4]) + (", ..." if len(found) > 4 else ""),
            hint="another --output-dir",
        )


def _already_holds_a_run(folder: Path) -> UserError:
    return UserError(
        "this folder already holds a run",
        where=str(folder),
        hint=f"{how_to_resume(folder)} to resume it, or another --output-dir",
    )


def how_to_resume(folder: Path) -> str:
    """The command with all settings of the run; without its config, the flags to add."""
    command = RunFolder(folder).resume_command if RunFolder(folder).config.is_file() else None
    return command or f"the same flags with --output-dir {shlex.quote(str(folder))} --resume auto"


def read_source(folder: Path, resume_from: Path | None) -> str:
    """The source to record in environment.json: the run that this one starts from; empty if there is none.

    A run that resumes itself keeps the source that it recorded at its first start.
    """
    if resume_from is not None and not is_same_folder(folder, owner_of(resume_from)):
        return describe_source(resume_from)
    recorded = read_object(folder / "environment.json", ENVIRONMENT).get(RESUMED_FROM, "")
    return str(recorded) if resume_from is not None else ""


def describe_source(source: Path) -> str:
    """The same text for the same checkpoint or run, however the path is written. `latest` and `best` are kept."""
    path = Path(os.path.abspath(source))  # noqa: PTH100 - removes `..` but does not follow links
    return str(path.parent.resolve() / path.name)


def is_same_folder(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def find_folder_of_job(loaded: LoadedConfig, job: str) -> Path | None:
    """The unfinished run of an earlier attempt of this job.

    It is found by the job id in the run's own records. The newest run of the recipe may be another run, or finished.
    """
    run = loaded.config.run
    named = [local_path(run.output_dir)] if run.output_dir else []
    if not named:
        named += [owner_of(local_path(run.resume))] if run.resume not in ("", "auto") else []
        named += [loaded.recipe_path.parent] if loaded.recipe_path.name == "config.yaml" else []
        named += sorted(RUNS.glob("*"), key=lambda path: path.name, reverse=True)
    for path in named:
        is_finished = RunFolder(path).read_status().get("status") == "finished"
        if job and not is_finished and read_object(RunFolder(path).environment, ENVIRONMENT).get("job") == job:
            return path
    return None


def _place_for_restart(loaded: LoadedConfig, folder: Path) -> RunPlace:
    """Restart in the folder of the previous attempt from its checkpoint, or else from that attempt's source."""
    if has_checkpoint(folder):
        return RunPlace(folder, folder, is_restart=True)
    resume = loaded.config.run.resume
    if resume == "auto":
        return dataclasses.replace(_place_for_auto(loaded, folder), is_restart=True)
    return RunPlace(folder, local_path(resume) if resume else None, is_restart=True)


def check_paths(loaded: LoadedConfig) -> None:
    """Refuse an empty path (an unset shell variable) and a path that is too long."""
    for name in ("output_dir", "resume", "init_from"):
        given = str(getattr(loaded.config.run, name))
        if not given and loaded.origin(name) == "flag":
            raise UserError(f"{name} is empty", where=loaded.where(name), hint="is a shell variable not set?")
        try:
            os.lstat(local_path(given, loaded.where(name)) / _LONGEST_NAME_INSIDE)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UserError(
                    f"{name} is longer than the file system allows",
                    where=loaded.where(name),
                    got=f"{given[:60]}..., {len(given):,} characters",
                ) from error


def check_init_from(loaded: LoadedConfig) -> None:
    given = loaded.config.run.init_from
    source = Path(given)
    if given and not source.is_file() and not has_checkpoint(source):
        raise UserError(
            "there are no weights to start from",
            where=loaded.where("init_from"),
            got=given,
            allowed="a run folder, one of its checkpoints, or a .safetensors, .pth or .pt file",
        )


def _place_for_auto(loaded: LoadedConfig, given: Path | None) -> RunPlace:
    """Resume in this run's own folder if it has a checkpoint; otherwise the load policy decides."""
    recipe_folder = loaded.recipe_path.parent if loaded.recipe_path.name == "config.yaml" else None
    if recipe_folder is not None and RunFolder(recipe_folder).files_of_others:
        recipe_folder = None  # a user's own recipe with the name config.yaml
    own = given or recipe_folder
    newest = newest_run_folder(loaded.recipe_name)
    if loaded.config.run.load_policy == "eager":
        folder, source = own, newest
    else:
        folder, source = own or newest, None
    if folder is None:
        return new_place(loaded, source)
    _refuse_files_of_others(folder)
    return RunPlace(folder, folder if has_checkpoint(folder) else source)


def owner_of(source: Path) -> Path:
    """The run folder of a path given to --resume: the path itself, or the parent of its checkpoints folder."""
    around = source.absolute().parent
    if (source / CHECKPOINT_MARK).exists() and around.name == "checkpoints":
        return around.parent
    return source.parent if source.name == "checkpoints" else source
