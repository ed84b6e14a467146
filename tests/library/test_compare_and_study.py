"""`paceline.compare` and `paceline.study`, and two threads that train at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import paceline
from harness.cli import paceline as run_command
from paceline.errors import UserError

pytestmark = pytest.mark.long

SMALL: dict[str, Any] = {
    "recipe": "synthetic-mlp",
    "num_samples": 300,
    "global_batch_size": 64,
    "epochs": 2,
    "track": (),
    "quiet": True,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[paceline.Run]:
    """Two equal runs and one with another seed, trained by threads at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    barrier = Barrier(3)

    def train(number: int) -> paceline.Run:
        barrier.wait()
        seed = 2 if number == 2 else 1
        return paceline.train(**SMALL, seed=seed, processes=1, output_dir=folder / str(number))

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(train, range(3)))


def test_threads_that_train_at_once_have_separate_runs(runs: list[paceline.Run]) -> None:
    assert [run.status for run in runs] == ["finished"] * 3
    assert [run.config.train.seed for run in runs] == [1, 1, 2]
    first, second, other = (run.results["weights_sha256"] for run in runs)
    assert first == second != other


def test_equal_and_different_runs(runs: list[paceline.Run], tmp_path: Path) -> None:
    same = paceline.compare(runs[:2])
    assert same.is_equal
    assert len(same.findings) == 1
    different = paceline.compare([runs[0].path, str(runs[2].path)])
    assert not different.is_equal
    table = different.table
    assert table.column("seed") == [1, 2]
    assert table.column("test_accuracy") == [run.results["test_accuracy"] for run in (runs[0], runs[2])]
    assert different._repr_html_().startswith("<table>")
    page = tmp_path / "page.html"
    different.write_page(page)
    assert "<html" in page.read_text()


def test_the_command_prints_the_same_result(runs: list[paceline.Run], tmp_path: Path) -> None:
    paths = [str(run.path) for run in runs]
    found = paceline.compare(runs)
    assert run_command("compare", *paths, cwd=tmp_path).out == f"{found}\n"
    answer = run_command("compare", *paths, "--json", cwd=tmp_path)
    assert (answer.code, json.loads(answer.out)) == (1, json.loads(json.dumps(found.to_json())))


def test_wrong_runs_are_refused(runs: list[paceline.Run]) -> None:
    for wrong in (runs[0], str(runs[0].path), runs[:1], [runs[0], runs[0]], [runs[0], "no-such-run"], []):
        with pytest.raises(UserError):
            paceline.compare(wrong)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_study_has_a_row_per_cell_and_continues(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "world_sizes": [1], "repeats": 1, "output_dir": tmp_path / "study"}
    found = paceline.study(**settings)
    assert found.table.column("state") == ["finished"]
    assert found.table.column("ranks") == [1]
    assert found.failed == {}
    assert found.report.exists()
    assert found.answers
    assert all(answer in str(found) for answer in found.answers)
    assert found._repr_html_().startswith("<table>")
    assert paceline.study(**settings).table == found.table  # nothing is trained again


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"world_sizes": [0]}, "world_sizes"),
        ({"world_sizes": "two"}, "world_sizes"),
        ({"strategies": ["dpp"]}, "strategies"),
        ({"repeats": 0}, "repeats"),
        ({"scaling": "stronk"}, "scaling"),
        ({"processes": 2}, "processes"),
        ({"epoch": 2}, "epoch"),
    ],
)
def test_a_wrong_study_is_refused_before_the_start(
    settings: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        paceline.study(**{**SMALL, **settings})
    assert name in str(caught.value.where)
    assert list(tmp_path.iterdir()) == []


def test_all_names_exist() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert paceline.__all__ == sorted(
        paceline.__all__, key=lambda name: (name != name.upper(), name.lower() == name, name)
    )
