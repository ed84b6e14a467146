"""A step is rebuilt with the recorded bits. The page has its samples, and a slider over the checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from harness.browser import Browser
from harness.ranks import make_world
from harness.runs import quick_config, train_in
from paceline.checkpoints.format import MANIFEST, Manifest, read_manifest
from paceline.cli.main import main
from paceline.errors import EXIT_FINISHED, EXIT_USER
from paceline.settings.load import to_yaml
from paceline.tools.trust.inspection import Answers, rebuild_step
from paceline.training.replay import Replay

FLAGS = ("--exact", "--lanes", "4", "--device", "cpu", "--keep-every-epochs", "1", "--dropout", "0.2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "run"
    train_in(make_world(0, 1), str(folder), FLAGS)
    (folder / "config.yaml").write_text(to_yaml(quick_config(*FLAGS)))
    return folder


def test_a_step_is_rebuilt(run: Path) -> None:
    with Replay(run) as replay:
        view = rebuild_step(replay, 12, lambda text: None)
    assert view.start == 9
    assert view.recorded == (view.taken.loss, view.taken.grad_norm)
    assert len(view.losses) == len(view.taken.ids) == 64
    # The mean of float32 losses, in another order than the step adds them.
    assert math.isclose(sum(view.losses) / 64, view.taken.loss, rel_tol=1e-6)
    total = math.sqrt(sum(norm**2 for norm in view.gradient_norms.values()))
    assert math.isclose(total, view.taken.grad_norm, rel_tol=1e-5)


def test_ranks_are_those_of_the_step(run: Path, tmp_path: Path) -> None:
    """A run may have been continued on another number of ranks."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    with Replay(copy) as replay:
        first = replay.stored[9]
        manifest = read_manifest(first)
        (first / MANIFEST).write_bytes(Manifest(manifest.files, {**manifest.about, "world_size": 2}).to_bytes())
        assert [rebuild_step(replay, step, lambda text: None).ranks.ranks for step in (2, 11)] == [2, 1]


@pytest.mark.long
def test_the_page(run: Path, tmp_path: Path, browser: Browser) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    page = tmp_path / "page.html"
    assert main(["inspect", str(run), "--step", "12", "--samples", "50", "--html", str(page)]) == EXIT_FINISHED
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    opened = browser.open_page(page)
    visible = "[...document.querySelectorAll('.frame')].filter((frame) => !frame.hidden).map((f) => f.innerText)"
    (frame,) = opened.evaluate(visible)
    assert frame.startswith("Checkpoint of step 18")
    move = "(() => { const input = document.querySelector('.slider input'); input.value = 0;"
    opened.evaluate(f"{move} input.dispatchEvent(new Event('input')); }})()")
    (frame,) = opened.evaluate(visible)
    assert frame.startswith("Checkpoint of step 9")
    text = opened.evaluate("document.body.innerText")
    assert all(title in text for title in ("Forgotten", "Never learned", "Probably mislabelled", "rank 0"))


def test_bad_steps(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "--step", "19", "--html", str(tmp_path / "page.html")]) == EXIT_USER
    assert "1 to 18" in capsys.readouterr().err
    assert main(["inspect", str(run), "--step", "2", "--html", str(tmp_path / "no" / "page.html")]) == EXIT_USER
    assert main(["inspect", str(tmp_path), "--step", "2"]) == EXIT_USER


def test_lists_of_samples() -> None:
    """Four samples at three checkpoints: learned, forgotten, never learned, and sure of another class."""
    predicted = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 2], [0, 2, 2, 2]])
    sure = torch.tensor([[0.9, 0.6, 0.5, 0.5], [0.9, 0.5, 0.5, 0.9], [0.9, 0.5, 0.6, 0.95]])
    own = torch.tensor([[0.9, 0.6, 0.3, 0.2], [0.9, 0.4, 0.3, 0.1], [0.9, 0.4, 0.3, 0.01]])
    answers = Answers([1, 2, 3], torch.arange(4), torch.tensor([0, 1, 1, 0]), predicted, sure, own)
    assert answers.forgotten().tolist() == [0, 1, 0, 0]
    assert answers.never_learned().tolist() == [False, False, True, True]
    assert answers.probably_mislabelled().tolist() == [False, False, False, True]
