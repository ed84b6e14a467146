"""One recipe, one seed, two ranks: every loss and every bit of the weights is the same for all launchers.

Slurm: tests/integrations/slurm/test_srun_conformance.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.cli import command
from harness.runnable_pipelines import STEPS, TINY_FLAGS, plain_training, undisturbed_pipeline
from harness.runs import read_results
from integrations.metaflow.test_metaflow import FlowRun, Place
from paceline.metrics.recorder import Row, read_rows

pytestmark = [pytest.mark.flows, pytest.mark.timeout(300)]
NEEDS = ("runnable", "metaflow", "metaflow_extensions")
READ_FLOW = """
import json, sys
from metaflow import Run, namespace
namespace(None)
data = Run(sys.argv[1]).data
print(json.dumps([data.history, data.results]))
"""


@dataclass(frozen=True)
class Outcome:
    losses: dict[int, float]  # of every step
    epochs: list[tuple[str, float, float]]  # phase, loss and accuracy
    weights: str
    optimizer: str
    test_loss: float
    world_size: int


def outcome_of(rows: list[Row], results: dict[str, Any]) -> Outcome:
    return Outcome(
        losses={row["step"]: row["loss"] for row in rows if row["kind"] == "step"},
        epochs=[(row["phase"], row["loss"], row["accuracy"]) for row in rows if row["kind"] == "epoch"],
        weights=results["weights_sha256"],
        optimizer=results["optimizer_sha256"],
        test_loss=results["test_loss"],
        world_size=results["world_size"],
    )


def read_outcome(folder: Path) -> Outcome:
    return outcome_of(read_rows(folder / "metrics.jsonl"), read_results(folder))


def by_torchrun(base: Path) -> Outcome:
    home = base / "torchrun"
    home.mkdir()
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    answer = command(*launch, "-m", "paceline", "train", *TINY_FLAGS, "--output-dir=run", cwd=home)
    assert answer.code == 0, answer.out + answer.err
    assert "by torchrun" in answer.out
    return read_outcome(home / "run")


def by_runnable(base: Path) -> Outcome:
    return read_outcome(undisturbed_pipeline(base).folder)


def by_metaflow(base: Path) -> Outcome:
    """Two nodes with a rank each."""
    place = Place(base / "conforming-flow")
    place.path.mkdir()
    recipe, *flags = TINY_FLAGS
    answer = place.flow("flow.py", "run", "--cluster-size", "2", "--recipe", recipe, "--flags", " ".join(flags))
    assert answer.code == 0, answer.out + answer.err
    read = command(
        *(sys.executable, "-c", READ_FLOW, FlowRun(place, answer.out).pathspec), cwd=place.path, env=place.variables()
    )
    assert read.code == 0, read.err
    return outcome_of(*json.loads(read.out.splitlines()[-1]))


@pytest.mark.parametrize("start", [by_torchrun, by_runnable, by_metaflow])
def test_losses_and_weights_equal_those_of_paceline_train(
    start: Callable[[Path], Outcome], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()
    alone = read_outcome(plain_training(base))
    assert list(alone.losses) == list(range(1, STEPS + 1))
    assert [phase for phase, _, _ in alone.epochs] == ["train", "val", "train", "val", "test"]
    assert alone.world_size == 2
    assert start(base) == alone
