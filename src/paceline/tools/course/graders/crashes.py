"""Lesson 8: a stop at any moment loses no checkpoint, and a resumed run ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.tools.course.ranks import describe_error, load_person, on_ranks, require_values, try_ranks
from paceline.tools.course.verdict import Failed, Item
from paceline.tools.course.watched_folder import Tree, fill_folder, watch_folder

State = dict[str, Tensor]
_STEPS = 8
_KILLED_IN = 5  # step 4 is saved by then
_WATCHED_STEPS = 3
# A small checkpoint fits into Python's file buffer: fsync without flush writes nothing of it. A large one does not fit.
_SMALL, _LARGE = 50, 20_000


def _fresh_state(size: int = _SMALL) -> State:
    return {"weights": torch.linspace(-1, 1, size), "momentum": torch.zeros(size)}


def _take_step(step: int, state: State) -> None:
    """Stands for forward, backward and update. The result depends on the step, the weights and the momentum."""
    gradient = torch.sin(state["weights"] * step)
    state["momentum"].mul_(0.9).add_(gradient)
    state["weights"].sub_(0.01 * state["momentum"])


def _state_after(steps: int, size: int = _SMALL) -> State:
    state = _fresh_state(size)
    for step in range(1, steps + 1):
        _take_step(step, state)
    return state


def _is_same(found: State, right: State) -> bool:
    return set(found) == set(right) and all(torch.equal(found[name], right[name]) for name in right)


@contextmanager
def _new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as parent:
        folder = Path(parent) / "checkpoints"
        folder.mkdir()
        yield folder


# --- Save and load ----------------------------------------------------------------------------------------------------


def _save(person: ModuleType, rank: int, world_size: int, folder: Path) -> None:
    person.save(folder, 3, _state_after(3), rank)


def _load(person: ModuleType, rank: int, world_size: int, folder: Path) -> Any:
    """None, or the step, the names in the state, and whether the values are those of step 3."""
    found = person.load_latest(folder)
    if found is None:
        return None
    step, state = found
    return int(step), sorted(state), _is_same(state, _state_after(3))


def check_round_trip(path: Path) -> None:
    with _new_folder() as folder:
        if on_ranks(path, 1, _load, folder)[0] is not None:
            raise Failed("invents-a-checkpoint", "load_latest found something in an empty folder", "Return None there.")
        on_ranks(path, 1, _save, folder)
        left = _list_files(folder)
        found = on_ranks(path, 1, _load, folder)[0]
    if left == "nothing":
        raise Failed("rank-0-does-not-save", "save on rank 0 wrote nothing", "Rank 0 saves: `if rank != 0: return`.")
    if found is None:
        what = f"save was called; the folder holds {left}; load_latest returned None"
        hint = "load_latest must look for the name that save gives, and return None only if there is no such file."
        raise Failed("not-found-again", what, hint)
    step, names, is_same = found
    if missing := {"weights", "momentum"} - set(names):
        raise Failed(
            "forgets-the-optimizer" if missing == {"momentum"} else "forgets-a-tensor",
            f"saved weights and momentum; load_latest returned {', '.join(names) or 'nothing'}",
            "The next step depends on all of `state`, also on the optimizer's momentum. Save and return all of it.",
        )
    if extra := set(names) - {"weights", "momentum"}:
        what = f"load_latest returned a state with {', '.join(sorted(extra))} in it"
        hint = "Return the step and the state separately: content.pop('step') takes the step out."
        raise Failed("more-than-the-state", what, hint)
    if step != 3:
        raise Failed("wrong-step-loaded", f"saved step 3; load_latest returned {step}", "Save the step, and return it.")
    if not is_same:
        what = "load_latest returned other values than were saved"
        raise Failed("other-values-loaded", what, "Save `state` as it is.")


def _list_files(folder: Path) -> str:
    return ", ".join(sorted(str(found.relative_to(folder)) for found in folder.rglob("*"))) or "nothing"


def _save_in_own_folder(person: ModuleType, rank: int, world_size: int, folder: Path) -> str:
    """Each rank gets a folder of its own, which shows who wrote."""
    own = folder / f"rank-{rank}"
    own.mkdir()
    person.save(own, 3, _fresh_state(), rank)
    return _list_files(own)


def check_one_writer(path: Path) -> None:
    with _new_folder() as folder:
        written = on_ranks(path, 2, _save_in_own_folder, folder)
    if written[1] != "nothing":
        raise Failed(
            "every-rank-saves",
            f"rank 1 wrote {written[1]} too",
            "All ranks hold the same weights, and two writers damage one file. `if rank != 0: return`.",
        )


# --- A stop at every moment of a save ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stop:
    """What a new process finds after a stop at one moment of a save."""

    saving: int  # the number of the save
    position: str
    left: str  # the names of the files
    problem: str  # "", lost, torn or leftovers
    text: str  # what load_latest, or the next save, did
    fsync: str  # of a file that the power failure damages: called before, called after, or never


def _stop_everywhere(
    person: ModuleType, rank: int, world_size: int, folder: Path, size: int, is_kill: bool
) -> list[_Stop]:
    """Save twice, stop at every moment, and use each folder that is left with a freshly loaded module."""
    path = Path(str(person.__file__))
    with watch_folder(folder, path) as watch:
        writer = load_person(path)
        writer.save(folder, 1, _state_after(1, size), rank)
        first = len(watch.moments)
        writer.save(folder, 2, _state_after(2, size), rank)
    stops = []
    for number, moment in enumerate(watch.moments):
        saving = 1 if number < first else 2
        tree = moment.after_kill if is_kill else moment.after_power_failure
        problem, text = _use(path, folder, tree, saving, size)
        damaged = moment.find_damaged()
        is_fsynced_later = any(damaged & later.fsynced for later in watch.moments[number:])
        fsync = "before" if damaged & moment.fsynced else "after" if is_fsynced_later else "never"
        stops.append(_Stop(saving, moment.position, ", ".join(tree) or "nothing", problem, text, fsync))
    return stops


def _use(path: Path, folder: Path, tree: Tree, saving: int, size: int) -> tuple[str, str]:
    """Load from this folder, save once more, and load that."""
    fill_folder(folder, tree)
    try:
        reader = load_person(path)
        found = reader.load_latest(folder)
    except Exception as error:
        return "torn", describe_error(error, path)
    if found is None and saving > 1:
        return "lost", "load_latest found no checkpoint"
    if found is not None:
        step, state = found
        if step not in (saving - 1, saving) or not _is_same(state, _state_after(step, size)):
            return "torn", f"load_latest returned step {step} with values that were never saved"
    try:
        reader.save(folder, 3, _state_after(3, size), 0)
        after = reader.load_latest(folder)
    except Exception as error:
        return "leftovers", describe_error(error, path)
    is_saved = after is not None and after[0] == 3 and _is_same(after[1], _state_after(3, size))
    return ("", "") if is_saved else ("leftovers", "the next save was not found again")


def _stop_saves(path: Path, is_kill: bool) -> list[_Stop]:
    stops = []
    for size in (_SMALL, _LARGE):
        with _new_folder() as folder:
            stops += on_ranks(path, 1, _stop_everywhere, folder, size, is_kill)[0]
    return stops


def check_kills(path: Path) -> str:
    stops = _stop_saves(path, is_kill=True)
    bad = [stop for stop in stops if stop.problem]
    # A lost or a torn checkpoint is worse than a refused save.
    for stop in sorted(bad, key=lambda stop: stop.problem == "leftovers"):
        what = f"killed {stop.position}\nduring save {stop.saving}; the folder holds {stop.left}\n{stop.text}"
        if stop.problem == "lost":
            raise Failed(
                "lost-checkpoint",
                what,
                "The old checkpoint was removed before the new one had its name. os.replace does both in one step.",
            )
        if stop.problem == "torn":
            raise Failed(
                "torn-checkpoint",
                what,
                "load_latest uses a file that is not complete yet. Write under another name, and give the complete "
                "file its final name with os.replace, which is atomic. A copy (shutil.copy) is not: it writes the "
                "final file again.",
            )
        raise Failed(
            "stopped-by-leftovers",
            what,
            "The checkpoint is whole, but a file that the kill has left stops the next save. Overwrite it.",
        )
    return f"save was stopped at {len(stops)} moments: each left a whole checkpoint, or none in the first save"


def check_power_failures(path: Path) -> None:
    bad = next((stop for stop in _stop_saves(path, is_kill=False) if stop.problem), None)
    if bad is None:
        return
    what = f"power failure {bad.position}\nduring save {bad.saving}; the folder holds {bad.left}\n{bad.text}"
    if bad.fsync == "before":
        raise Failed(
            "fsync-before-flush",
            f"{what}\nfsync was called for a file before all of its content was written",
            "Python keeps the end of the file in its own buffer, and fsync does not see it. file.flush() first, then "
            "os.fsync(file.fileno()).",
        )
    if bad.fsync == "after":
        raise Failed(
            "fsync-after-rename",
            f"{what}\nfsync was called later, when the file already had its final name",
            "First the content, then the name: flush and fsync while the file has its temporary name.",
        )
    raise Failed(
        "not-flushed",
        f"{what}\nfsync was not called for the file with the final name",
        "The system may keep what is written in memory for half a minute. After a power failure the new name is there "
        "and its content is not. file.flush(), then os.fsync(file.fileno()), then the rename.",
    )


# --- Resume -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Resumed:
    steps: list[list[int]]  # of all ranks, one list for each call of take_step
    is_same_state: bool  # as after an undisturbed run
    saved: list[int]  # the newest checkpoint before each step, seen by rank 0; 0: none


class _RanksDisagree(Exception):
    """The ranks of one training are in different steps."""


def _train(person: ModuleType, rank: int, world_size: int, folders: list[Path], killed_in: int | None) -> _Resumed:
    folder = folders[rank]
    steps: list[list[int]] = []
    saved: list[int] = []

    def take_step(step: int, state: State) -> None:
        # Stands for the sum of gradients. The ranks compare their steps: if they differ, real ranks would hang.
        found = [0] * world_size
        dist.all_gather_object(found, step)
        steps.append(found)
        if rank == 0:
            newest = person.load_latest(folder)
            saved.append(newest[0] if newest else 0)
        if len(set(found)) > 1:
            raise _RanksDisagree
        if step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        _take_step(step, state)

    try:
        state = person.train(folder, _STEPS, _fresh_state(), take_step, rank)
    except _RanksDisagree:
        return _Resumed(steps, False, saved)
    return _Resumed(steps, _is_same(state, _state_after(_STEPS)), saved)


def check_resume(path: Path) -> None:
    with _new_folder() as folder:
        fresh = require_values(try_ranks(path, 2, _train, [folder, folder], None))[0]
    if fresh.steps != [[step, step] for step in range(1, _STEPS + 1)]:
        took = [found[0] for found in fresh.steps]
        raise Failed("wrong-steps", f"a new run took the steps {took}", f"A new run takes the steps 1 to {_STEPS}.")
    if not fresh.is_same_state:
        raise Failed(
            "wrong-state-returned",
            "a new run took the right steps, but train returned another state than they make",
            "take_step changes `state` in place; train returns it.",
        )
    with _new_folder() as folder:
        try_ranks(path, 2, _train, [folder, folder], _KILLED_IN)
        left = _list_files(folder)
        # Each rank resumes from a copy: code that saves too early must not change what the other rank loads.
        copies = [shutil.copytree(folder, folder.with_name(f"rank-{rank}")) for rank in range(2)]
        ranks = require_values(try_ranks(path, 2, _train, copies, None))
    for rank, resumed in enumerate(ranks):
        _check_steps(resumed.steps, left)
        if not resumed.is_same_state:
            raise Failed(
                "resumes-with-other-state",
                f"the steps are right, but rank {rank} does not end with the state of an undisturbed run",
                "The state must come from the checkpoint, all of it and on every rank: done, state = saved.",
            )
    if fresh.saved != list(range(_STEPS)):
        raise Failed(
            "not-every-step-saved",
            f"before the steps 1 to {_STEPS} of a new run the newest checkpoints were of the steps {fresh.saved}",
            "train calls save after each step: a kill then costs at most the step that it interrupts.",
        )


def _check_steps(taken: list[list[int]], left: str) -> None:
    what = f"two ranks were killed in step {_KILLED_IN}; the folder held {left}"
    for found in taken:
        if len(set(found)) > 1:
            raise Failed(
                "ranks-disagree",
                f"{what}; then rank 0 took step {found[0]} and rank 1 step {found[1]}",
                "Only one rank saves, but every rank resumes: each loads the step and the state. Ranks in different "
                "steps hang in the next collective, or add gradients that do not belong together.",
            )
    if left == "nothing":
        raise Failed("train-does-not-save", what, "train calls save after each step.")
    after = [found[0] for found in taken]
    what = f"{what}; resumed, each rank took the steps {after}"
    if after and after[0] == 1:
        raise Failed(
            "restarts-from-zero",
            what,
            "The loop starts at 1 again. It must start after the saved step, which load_latest returns.",
        )
    if after and after[0] == _KILLED_IN - 1:
        raise Failed("repeats-a-step", what, "The saved step is complete: continue with the one after it.")
    if not after or after[0] > _KILLED_IN:
        raise Failed(
            "skips-a-step", what, f"Step {_KILLED_IN} was not finished: it must be taken again. Save after take_step."
        )
    if after != list(range(_KILLED_IN, _STEPS + 1)):
        raise Failed("wrong-steps", what, f"From the step after the saved one up to {_STEPS}.")


def _resume_everywhere(person: ModuleType, rank: int, world_size: int, folder: Path) -> tuple[int, str]:
    """Stop a training at every moment and resume it: how often, and the first resumed run that ends differently."""
    path = Path(str(person.__file__))
    with watch_folder(folder, path) as watch:
        load_person(path).train(folder, _WATCHED_STEPS, _fresh_state(), _take_step, rank)
    right = _state_after(_WATCHED_STEPS)
    count = 0
    for moment in watch.moments:
        for kind, tree in (("killed", moment.after_kill), ("power failure", moment.after_power_failure)):
            fill_folder(folder, tree)
            count += 1
            stop = f"{kind} {moment.position}\nthe folder holds {', '.join(tree) or 'nothing'}"
            try:
                state = load_person(path).train(folder, _WATCHED_STEPS, _fresh_state(), _take_step, rank)
            except Exception as error:
                return count, f"{stop}\nthe resumed run failed: {describe_error(error, path)}"
            if not _is_same(state, right):
                return count, f"{stop}\nthe resumed run ended with another state"
    return count, ""


def check_every_resume(path: Path) -> str:
    with _new_folder() as folder:
        count, problem = on_ranks(path, 1, _resume_everywhere, folder)[0]
    if problem:
        raise Failed(
            "other-end",
            problem,
            "Saving and loading are right by themselves. Look at train: step and state must come from one checkpoint.",
        )
    return f"a training of {_WATCHED_STEPS} steps was stopped and resumed {count} times: always the same bits"


ITEMS = (
    Item("what is saved can be loaded again, complete", check_round_trip, ("save", "load_latest")),
    Item("one rank saves", check_one_writer, ("save",)),
    Item("a kill at any moment of a save leaves a whole checkpoint", check_kills, ("save", "load_latest")),
    Item("so does a power failure", check_power_failures, ("save", "load_latest")),
    Item("every rank resumes with the next step", check_resume),
    Item("a training that is stopped at any moment ends with the same bits", check_every_resume),
)
