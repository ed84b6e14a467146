"""Record what a scenario does to a run folder, create every state that a crash may leave, and restart from it."""

from __future__ import annotations

import re
import shutil
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.power_loss import Crash, make_folder, replay
from harness.recorded_disk import Record, Recorder, read_tree, recording
from harness.run_lives import RunLife, as_another_process, check_rows, check_whole, leftovers_in, steps_in
from paceline.checkpoints import store
from paceline.checkpoints.named import list_checkpoints
from paceline.runs.folder import RunFolder

Scenario = Callable[[Path, Recorder], None]
_TESTS = str(Path(__file__).parents[1])


def record_life(
    disk: Path,
    scenario: Scenario,
    before: Callable[[Path], None] | None = None,
    *,
    break_code: Callable[[], None] = lambda: None,
) -> Record:
    """Record what a scenario does to a run folder that `before` has created. The writer counts as dead afterwards."""
    root = disk / "recorded"
    root.mkdir()
    with as_another_process():
        if before is not None:
            before(root / "run")
        break_code()
        with recording(root) as recorder:
            scenario(root / "run", recorder)
    assert replay(recorder.record) == read_tree(root)
    return recorder.record


def check_restart(run: Path, crash: Crash, coming: dict[str, Any] | None, *, goes_on: bool) -> None:
    """A restart finds the reported checkpoints, removes leftovers, and continues."""
    folder = RunFolder(run)
    reported = crash.last("saved", {"step": 0, "kept": [], "best": 0})
    if run.is_dir():
        before = read_tree(run)
        assert [item.path.name for item in list_checkpoints(folder.checkpoints, thorough=True) if item.damage] == []
        found = check_whole(folder)
        assert read_tree(run) == before  # reading changes nothing
    else:
        found = set()
    newest = max(found, default=0)
    latest = folder.checkpoints / "latest"
    if latest.is_symlink() and not list(folder.checkpoints.glob("replaced-*")):
        assert latest.exists()  # a pointer is written after its target
    assert newest in (reported["step"], coming["step"] if coming else reported["step"])
    is_new = coming is not None and newest == coming["step"]
    kept = set(reported["kept"]) & set(coming["kept"]) if is_new else set(reported["kept"])
    assert found >= kept

    life = RunLife(run)
    assert life.step == newest
    check_rows(folder, newest)
    if life.best_step:
        best = store.pointed_at(folder.checkpoints, "best")
        assert best is not None
        assert best.name == f"step-{life.best_step:08}"
    assert leftovers_in(folder) == []
    if goes_on:
        life.train(1)
        life.save()
        check_whole(folder)
        check_rows(folder, newest + 1)
        assert steps_in(folder)[0] == newest + 1
        assert leftovers_in(folder) == []
    life.close()


@dataclass
class Outcome:
    """The number of tested states, and the faults with their states."""

    states: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict)  # by the line that failed

    def require_none(self, *, at_least: int) -> None:
        """Require no fault in at least this number of states: an empty record must not pass."""
        assert self.states >= at_least
        lines = [f"{len(where)} states: {fault}\n    {where[0]}" for fault, where in self.faults.items()]
        assert not lines, "\n".join([f"of {self.states} states", *lines])


def try_all(
    disk: Path,
    crashes: Iterable[Crash],
    record: Record,
    check: Callable[..., None],
    *,
    coming: Any = None,
    total: Outcome | None = None,
) -> Outcome:
    """Create every state on a disk and restart from it. `coming`: a save that may exist without being reported."""
    reports = [operation.value for operation in record.operations if getattr(operation, "what", "") == "saved"]
    outcome = Outcome() if total is None else total
    seen = set()  # continuing depends only on the checkpoints folder, so test each of its states once
    for crash in crashes:
        checkpoints = tuple(item for item in crash.tree.items() if item[0].startswith("run/checkpoints"))
        target = disk / f"crash-{outcome.states}"
        make_folder(crash.tree, target)
        number = len([mark for mark in crash.reported if mark.what == "saved"])
        try:
            following = coming or (reports[number] if number < len(reports) else None)
            check(target / "run", crash, following, goes_on=checkpoints not in seen)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in where if frame.filename.startswith(_TESTS)][-1]
            fault = f"{ours.name}: {ours.line} ({type(error).__name__}: {str(error)[:300]})"
            outcome.faults.setdefault(re.sub(r"crash-\d+", "crash", fault), []).append(str(crash))
        shutil.rmtree(target)
        seen.add(checkpoints)
        outcome.states += 1
    return outcome
