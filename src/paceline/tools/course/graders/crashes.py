"""Lesson 8: saving so that a kill at any moment costs a step, and resuming so that nobody can tell."""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.tools.course.ranks import Ending, on_ranks, require_values, try_ranks
from paceline.tools.course.verdict import Failed, Item

State = dict[str, Tensor]
_STEPS = 8
_KILLED_IN = 5  # the step of the planned kill: four are done and saved by then
_MANY_STEPS = 150
_KILLS = 3
_NUMBERS = 4000


def _fresh_state() -> State:
    return {"weights": torch.linspace(-1, 1, _NUMBERS), "momentum": torch.zeros(_NUMBERS)}


def _take_step(step: int, state: State) -> None:
    """Stands for forward, backward and update: what comes out depends on the step, the weights and the momentum."""
    gradient = torch.sin(state["weights"] * step)
    state["momentum"].mul_(0.9).add_(gradient)
    state["weights"].sub_(0.01 * state["momentum"])


def _trained(steps: int) -> list[float]:
    state = _fresh_state()
    for step in range(1, steps + 1):
        _take_step(step, state)
    return [float(value) for value in state["weights"]]


# --- Saving -----------------------------------------------------------------------------------------------------------


def _save_on_rank(person: ModuleType, rank: int, world_size: int, folder: str) -> list[str]:
    # Each rank gets a folder of its own, so that it can be seen who wrote.
    own = Path(folder) / f"rank-{rank}"
    own.mkdir()
    person.save(own, 3, _fresh_state(), rank)
    return sorted(path.name for path in own.iterdir())


def _save_and_note(person: ModuleType, rank: int, world_size: int, folder: str) -> list[str]:
    """What happens to the disk during a save, in order."""
    events: list[str] = []

    def note(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return original(*arguments, **options)

        return noting

    for name in ("fsync", "replace", "rename"):
        setattr(os, name, note(name, getattr(os, name)))
    person.save(Path(folder), 3, _fresh_state(), rank)
    return events


def _load(person: ModuleType, rank: int, world_size: int, folder: str) -> Any:
    found = person.load_latest(Path(folder))
    if found is None:
        return None
    step, state = found
    return int(step), {name: [float(v) for v in tensor] for name, tensor in state.items()}


def _size_of(folder: str) -> int:
    return max((path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()), default=0)


def check_round_trip(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as folder:
        if on_ranks(path, 1, _load, folder)[0] is not None:
            raise Failed("invents-a-checkpoint", "load_latest found something in an empty folder", "Return None there.")
        events = on_ranks(path, 1, _save_and_note, folder)[0]
        found = on_ranks(path, 1, _load, folder)[0]
    if found is None:
        raise Failed("not-found-again", "save was called, and load_latest found nothing", "Do the names agree?")
    step, state = found
    missing = {"weights", "momentum"} - set(state)
    if missing:
        raise Failed(
            "forgets-the-optimizer",
            f"saved weights and momentum, got back {sorted(state)}",
            "The optimizer's state is half of where training stands: without its momentum the next steps are others. "
            "Save all of `state`.",
        )
    if step != 3 or state != {name: [float(v) for v in t] for name, t in _fresh_state().items()}:
        raise Failed(
            "not-the-same-state", f"saved at step 3, got back step {step} or other numbers", "Save the step too."
        )
    if "fsync" not in events:
        raise Failed(
            "not-flushed",
            f"a save did: {', '.join(events) or 'no fsync, no rename'}",
            "What is written may sit in memory for half a minute. After a power cut the new name is there and its "
            "content is not. file.flush(), then os.fsync(file.fileno()), then the rename.",
        )
    if "replace" in events and events.index("fsync") > events.index("replace"):
        raise Failed("flushed-too-late", f"a save did: {', '.join(events)}", "First the content, then the name.")


def check_one_writer(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as folder:
        written = on_ranks(path, 2, _save_on_rank, folder)
    if not written[0]:
        raise Failed("nobody-saves", "rank 0 wrote nothing", "Rank 0 saves.")
    if written[1]:
        raise Failed(
            "every-rank-saves",
            f"rank 1 wrote {', '.join(written[1])} too",
            "All ranks hold the same weights, and two writers of one file tear it. `if rank != 0: return`.",
        )


# --- Dying while saving -----------------------------------------------------------------------------------------------


def _die_while_writing(person: ModuleType, rank: int, world_size: int, folder: str) -> str:
    """The kernel ends the process in the middle of the second save's file, at half of its size."""
    person.save(Path(folder), 1, _fresh_state(), rank)
    half = _size_of(folder) // 2
    state = _fresh_state()
    _take_step(1, state)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))
    person.save(Path(folder), 2, state, rank)
    return "survived"


def check_torn_write(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as folder:
        try_ranks(path, 1, _die_while_writing, folder)
        left = sorted(found.name for found in Path(folder).rglob("*") if found.is_file())
        ending = try_ranks(path, 1, _load, folder)[0]
    what = f"the process was killed in the middle of its second save; the folder holds {', '.join(left) or 'nothing'}"
    if ending.kind != "value" or (ending.value is not None and ending.value[0] != 1):
        told = ending.value if ending.kind != "value" else f"step {ending.value[0]}"
        raise Failed(
            "torn-checkpoint",
            f"{what}; load_latest: {told}",
            "Half a checkpoint is in the place of the good one. Write under another name first, and give it its real "
            "name with os.replace once it is complete: at every moment there is one whole checkpoint under that name.",
        )
    if ending.value is None:
        raise Failed(
            "lost-checkpoint",
            f"{what}; load_latest found none",
            "The good one was gone before the new one was there. os.replace does both in one moment.",
        )


# --- Resuming ---------------------------------------------------------------------------------------------------------


def _train(person: ModuleType, rank: int, world_size: int, folder: str, last_step: int, killed_in: int) -> list[float]:
    journal = Path(folder).parent / "journal"

    def take_step(step: int, state: State) -> None:
        with journal.open("a") as file:
            file.write(f"{step}\n")
        if step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        _take_step(step, state)

    state = person.train(Path(folder), last_step, _fresh_state(), take_step, rank)
    return [float(value) for value in state["weights"]]


def check_resume(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as parent:
        folder, journal = Path(parent) / "checkpoints", Path(parent) / "journal"
        folder.mkdir()
        try_ranks(path, 1, _train, str(folder), _STEPS, _KILLED_IN)
        before = journal.read_text().split() if journal.exists() else []
        if before != [str(step) for step in range(1, _KILLED_IN + 1)]:
            raise Failed("wrong-steps", f"a fresh run took the steps {' '.join(before)} ...", "From 1 to last_step.")
        journal.unlink()
        weights = require_values(try_ranks(path, 1, _train, str(folder), _STEPS, 0))[0]
        _check_steps([int(step) for step in journal.read_text().split()] if journal.exists() else [])
    if weights != _trained(_STEPS):
        raise Failed(
            "resumes-with-other-state",
            "the steps are right, the weights at the end are not those of an undisturbed run",
            "Does the state that goes on come from the checkpoint, all of it? state.update(saved), or state = saved.",
        )


def _check_steps(after: list[int]) -> None:
    what = f"killed in step {_KILLED_IN}, with step {_KILLED_IN - 1} saved; resumed, it took {after}"
    if after and after[0] == 1:
        raise Failed(
            "restarts-from-zero",
            what,
            "The weights may come from the checkpoint, but the loop starts anew: these samples are seen twice.",
        )
    if after and after[0] == _KILLED_IN - 1:
        raise Failed("repeats-a-step", what, "A saved step is done: go on with the one after it.")
    if not after or after[0] > _KILLED_IN:
        raise Failed("skips-a-step", what, f"Step {_KILLED_IN} was not finished: it must be taken again.")
    if after != list(range(_KILLED_IN, _STEPS + 1)):
        raise Failed("wrong-steps", what, f"From the one after the saved step up to {_STEPS}.")


def check_random_kills(path: Path) -> str:
    dice = random.Random()
    with tempfile.TemporaryDirectory(prefix="paceline-course-") as parent:
        folder = Path(parent) / "checkpoints"
        folder.mkdir()
        endings: list[Ending] = []
        kills = 0
        while kills < _KILLS:
            endings = try_ranks(path, 1, _train, str(folder), _MANY_STEPS, 0, kill_after_s=dice.uniform(0.1, 0.5))
            if endings[0].kind != "died":
                break
            kills += 1
        if endings[0].kind == "died":
            endings = try_ranks(path, 1, _train, str(folder), _MANY_STEPS, 0)
    if endings[0].kind == "error":
        raise Failed(
            "torn-checkpoint",
            f"after {kills} kills at random moments: {endings[0].value}",
            "A kill found a moment without a whole checkpoint, or left something that load_latest trips over.",
        )
    if require_values(endings)[0] != _trained(_MANY_STEPS):
        raise Failed(
            "another-end",
            f"after {kills} kills at random moments the weights are not those of an undisturbed run",
            "Step and state must come from one and the same checkpoint.",
        )
    return f"killed {kills} times at random moments on the way to step {_MANY_STEPS}: the same weights, bit for bit"


ITEMS = (
    Item("what is saved comes back, flushed and complete", check_round_trip, ("save", "load_latest")),
    Item("one rank saves", check_one_writer, ("save",)),
    Item("a kill in the middle of a save costs nothing", check_torn_write, ("save", "load_latest")),
    Item("a resumed run goes on with the next step", check_resume),
    Item("kills at random moments change nothing", check_random_kills),
)
