"""`paceline predict` uses the model like evaluation: same weights, same views, same batches."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import paceline
from harness.cli import paceline as run_command
from paceline.training.evaluate import evaluate
from paceline.training.objective import Objective, UserFunction
from paceline.training.reuse import load_test_data, open_run, predict_pictures

FLAGS = ["--dataset=folder", "--data-dir=pictures", "--image-size=32", "--augment=none", "--epochs=2", "--track"]
FLAGS += ["--global-batch-size=8", "--processes=1", "--ema-decay=0.5", "--test-batch-size=5", "--num-workers=0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("predict")
    draw = np.random.default_rng(0)
    for half, count in (("train", 12), ("test", 4)):
        for name in ("left", "right", "top"):
            folder = home / "pictures" / half / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    answer = run_command("train", "shapes-cnn", *FLAGS, "--test-views=6", "--output-dir=run", cwd=home)
    assert answer.code == 0, answer.err
    return home


@pytest.mark.parametrize("views", [1, 2, 6])
def test_probabilities_equal_those_of_evaluation(home: Path, views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, for every number of views, with averaged weights and several batches."""
    monkeypatch.chdir(home)
    run = open_run(Path("run"), [f"--test-views={views}"])
    seen: list[Tensor] = []

    def keep(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits.softmax(1))
        return labels.float()

    evaluate(
        run.model,
        load_test_data(run),
        run.world,
        num_classes=3,
        batch_size=run.config.train.test_batch_size,
        objective=Objective(metrics={"keep": UserFunction("keep", keep)}),
        views=run.config.train.test_views,
    )
    pictures = sorted((home / "pictures" / "test").glob("*/*.png"))
    assert predict_pictures(run, pictures) == torch.cat(seen).tolist()


def test_the_command_and_the_library_give_the_same_results(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command uses the views of the training, like the library."""
    monkeypatch.chdir(home)
    picture = home / "pictures" / "test" / "left" / "0.png"
    answer = run_command("predict", "run", str(picture), cwd=home)
    assert answer.code == 0, answer.err
    shown = dict(re.findall(r"(\w+) ([\d.]+%)", answer.out.partition(": ")[2]))
    [prediction] = paceline.load_run(home / "run").predict(picture)
    assert shown == {name: f"{value:.1%}" for name, value in prediction.probabilities.items()}
