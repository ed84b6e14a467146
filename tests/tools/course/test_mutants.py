"""Every small change of a solution gets the hint that is listed for it in mutant_hints.txt.

"passes" there means that the exercise does not require the changed part: an order of independent lines, an omitted
default value, a prediction that is not graded.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from solution_mutants import Mutant, find_mutants

from paceline.tools.course.lessons import LESSONS, find_lesson
from paceline.tools.course.verdict import Failed, Item

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("rank_server")]
MUTANTS = [mutant for lesson in LESSONS if lesson.suffix == ".py" for mutant in find_mutants(lesson)]
HINTS = {
    name: hint
    for line in (Path(__file__).parent / "mutant_hints.txt").read_text().splitlines()
    for hint, _, name in [line.partition(" | ")]
}
SCRIPT = find_lesson("10")
SCRIPT_CHANGES = [
    ("#SBATCH --nodes=2", "#SBATCH --nodes=3", "wrong-nodes"),
    ("#SBATCH --nodes=2", "", "wrong-nodes"),
    ("#SBATCH --ntasks-per-node=2", "#SBATCH --ntasks-per-node=3", "wrong-tasks"),
    ("#SBATCH --ntasks-per-node=2", "", "wrong-tasks"),
    ("#SBATCH --ntasks-per-node=2", "#SBATCH --ntasks=many", "wrong-tasks"),
    ("#SBATCH --time=00:05:00", "", "no-time-limit"),
    ("export MASTER_PORT=", "unset MASTER_PORT; PORT=", "no-port"),
    (" --kill-on-bad-exit=1", "", "survivors-hang"),
    ("RANK=$SLURM_PROCID ", "", "rank-not-set"),
    ("WORLD_SIZE=$SLURM_NTASKS ", "", "wrong-world-size"),
    ("LOCAL_RANK=$SLURM_LOCALID ", "", "local-rank-not-set"),
    ("RANK=$SLURM_PROCID ", "RANK=$SLURM_LOCALID ", "local-rank-as-rank"),
    ("export MASTER_ADDR=", "unset MASTER_ADDR; ADDR=", "no-master"),
]


def find_hint(number: int, function: str, path: Path) -> str:
    """The hint of the first item that fails. Items that do not use the changed function pass as with the solution."""
    lesson = find_lesson(str(number))
    items: tuple[Item, ...] = importlib.import_module(f"paceline.tools.course.graders.{lesson.grader}").ITEMS
    for item in items:
        if item.uses and function and function not in item.uses:
            continue
        try:
            item.check(path)
        except Failed as failure:
            return failure.hint
    return "passes"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_gets_its_hint(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = HINTS[mutant.name]
    if wanted == "endless":
        monkeypatch.setattr("paceline.tools.course.ranks._DEADLINE_S", 10.0)
    path = tmp_path / "mutant.py"
    path.write_text(mutant.source)
    assert find_hint(mutant.lesson.number, mutant.function, path) == wanted


@pytest.mark.parametrize(("old", "new", "wanted"), SCRIPT_CHANGES)
def test_a_changed_job_script_gets_its_hint(
    old: str, new: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    text = SCRIPT.solution.read_text()
    assert old in text
    path = tmp_path / "mutant.sbatch"
    path.write_text(text.replace(old, new, 1))
    assert find_hint(SCRIPT.number, "", path) == wanted


def test_the_list_has_every_mutant_and_no_other() -> None:
    assert sorted(HINTS) == sorted(mutant.name for mutant in MUTANTS)
