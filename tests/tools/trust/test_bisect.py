"""`paceline bisect`: planted differences of 700-step runs are found, with few replays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from harness.cli import paceline
from paceline.checkpoints.format import step_folders
from paceline.data.order import epoch_order
from paceline.errors import CheckpointError, DataError, UserError
from paceline.metrics.recorder import read_rows
from paceline.runs.comparison import read_record
from paceline.runs.trust import TRUST_VARIABLE
from paceline.tools.trust.bisect import Bisection, bisect_runs, find_window
from paceline.training.inject import flip_a_bit

pytestmark = pytest.mark.long

SEED, SAMPLES, BATCH, EPOCH_STEPS = 42, 5600, 8, 60
PLANTED = int(epoch_order(SAMPLES, SEED, 4)[77])  # a sample that is first used late
DATA = f"""
import torch

def load():
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn({SAMPLES + 800}, 8, generator=generator)
    labels = (samples[:, 0] > 0).long()
    return (samples[:{SAMPLES}], labels[:{SAMPLES}]), (samples[{SAMPLES}:], labels[{SAMPLES}:])
"""
FLAGS = (
    *("train", "shapes-cnn", "--model-name=mlp", "--hidden-size=8", "--augment=none", f"--global-batch-size={BATCH}"),
    *(
        "--exact",
        "--lanes=2",
        "--epochs=12",
        "--max-steps=700",
        "--train-split=1",
        "--save-steps=100",
        "--keep-last=20",
        "--track",
    ),
    *(f"--seed={SEED}", f"--epoch-samples={EPOCH_STEPS * BATCH}", "--save-epochs=100"),
    *("--log-frequency=50", "--schedule=steps", "--processes=1"),
)
BASE = ("--dataset=good.py:load", "--lr-steps=11")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that differ from `base` in one sample, in a late setting among others, in nothing, and in a flipped bit."""
    folder = tmp_path_factory.mktemp("bisect")
    (folder / "good.py").write_text(DATA)
    (folder / "bad.py").write_text(DATA.replace("    return", f"    samples[{PLANTED}, 5] += 0.5\n    return"))
    runs = {
        "base": BASE,
        "sample": ("--dataset=bad.py:load", "--lr-steps=11"),
        "setting": (*BASE[:1], "--lr-steps=7", "--spike-factor=1000", "--unreadable=3", "--hang-timeout-s=99"),
        "flipped": (*BASE, "--inject=flip rank=0 step=333 bit=24"),
    }
    for name, flags in runs.items():
        answer = paceline(*FLAGS, *flags, f"--output-dir={name}", cwd=folder)
        assert answer.code == 0, answer
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv(TRUST_VARIABLE, "1")


def find(first: str, second: str) -> Bisection:
    threads = torch.get_num_threads()
    try:
        return bisect_runs(Path(first), Path(second), tell=lambda _: None)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_one_changed_sample() -> None:
    orders = [epoch_order(SAMPLES, SEED, epoch)[: EPOCH_STEPS * BATCH].tolist() for epoch in range(12)]
    place = [sample for order in orders for sample in order].index(PLANTED)
    found = find("base", "sample")
    assert found.step == place // BATCH + 1 > 60
    assert found.place is not None
    assert (found.place.what, found.place.sample, found.place.position) == ("the input", PLANTED, place % BATCH)
    assert [(cause.kind, cause.name) for cause in found.causes] == [("data", "dataset")]
    assert found.is_cause_tried
    assert found.replays <= 12


def test_a_late_setting_among_others() -> None:
    found = find("base", "setting")
    assert found.window.same == 400
    assert found.step == 421  # the first after seven epochs
    assert found.place is not None
    assert found.place.what.startswith("the update of ")
    assert [(cause.kind, cause.name) for cause in found.causes] == [("flag", "lr_steps")]
    assert found.is_cause_tried
    assert found.replays <= 12


def test_without_checkpoints_the_replays_start_at_step_0() -> None:
    shutil.copytree("sample", "bare")
    for path in step_folders(Path("bare/checkpoints")):
        shutil.rmtree(path)
    found = find("base", "bare")
    assert found.window.same == 0
    assert found.step == find("base", "sample").step


def test_a_flipped_bit_is_not_blamed_on_a_setting() -> None:
    found = find("base", "flipped")
    assert (found.window.same, found.step, found.causes, found.replays) == (300, None, [], 2)
    assert not found.is_equal
    (note,) = found.notes
    assert note.startswith("B ")
    assert note.endswith("step 333")


def test_equal_and_unrelated_runs(folder: Path) -> None:
    shutil.copytree("base", "copy")
    assert find("base", "copy").is_equal
    answer = paceline("bisect", "base", "copy", "--json", cwd=folder)
    assert (answer.code, json.loads(answer.out)["equal"]) == (0, True), answer
    wide = paceline(*FLAGS, *BASE, "--hidden-size=9", "--max-steps=60", "--output-dir=wide", cwd=folder)
    assert wide.code == 0, wide
    with pytest.raises(UserError, match="different models"):
        find("base", "wide")


def test_a_run_that_ends_earlier_is_equal_as_far_as_it_goes(folder: Path) -> None:
    answer = paceline(*FLAGS, *BASE, "--max-steps=150", "--output-dir=short", cwd=folder)
    assert answer.code == 0, answer
    found = find("base", "short")
    assert found.is_equal
    assert found.window.last_steps == (700, 150)
    assert found.replays == 0


def test_a_moving_average_is_a_setting_not_another_model(folder: Path) -> None:
    answer = paceline(*FLAGS, *BASE, "--max-steps=150", "--ema-decay=0.9", "--output-dir=average", cwd=folder)
    assert answer.code == 0, answer
    found = find("base", "average")
    assert found.step == 0
    assert [(cause.kind, cause.name) for cause in found.causes] == [("flag", "ema_decay")]
    assert found.is_cause_tried


def test_what_is_known_is_said_though_a_replay_is_impossible(folder: Path) -> None:
    bad = (folder / "bad.py").read_text()
    (folder / "bad.py").write_text(bad.replace("+= 0.5", "+= 0.25"))
    with pytest.raises(DataError, match="checkpoint of step 200"):
        find("base", "sample")
    (folder / "bad.py").write_text(bad)
    shutil.copytree("sample", "damaged")
    for path in step_folders(Path("damaged/checkpoints")):
        if path.name > "step-00000200":
            shutil.rmtree(path)
    flip_a_bit(Path("damaged/checkpoints"))
    records = [read_record(Path(name), read_rows(Path(name) / "metrics.jsonl")) for name in ("base", "damaged")]
    assert find_window(*records).same == 200  # the manifests agree; the damage shows when the file is opened
    with pytest.raises(CheckpointError, match="checkpoint of step 200"):
        find("base", "damaged")
