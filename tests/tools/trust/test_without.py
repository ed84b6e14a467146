"""A replay without samples has the bits of a run from scratch that never had them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from harness.ranks import make_world
from harness.runs import quick_config, read_results, train_in
from paceline.checkpoints.format import step_folders, step_of
from paceline.cli.main import main
from paceline.data.order import samples_of
from paceline.data.registry import load_dataset
from paceline.data.sampling import Sampling, sampling_of
from paceline.errors import EXIT_CHECKPOINT, EXIT_FINISHED, EXIT_USER, UserError
from paceline.runs.receipt import read_receipt
from paceline.settings.load import load_config, to_yaml
from paceline.settings.samples import read_excluded, read_relabelled
from paceline.training.plan import split_samples

FLAGS = ("--exact", "--lanes", "2", "--device", "cpu", "--save-steps", "2", "--keep-last", "20", "--dropout", "0.2")


def ids_of_step(step: int) -> list[int]:
    """Samples whose first use is this step of the first epoch."""
    config = quick_config(*FLAGS)
    data = load_dataset(config.data, config.train.seed)
    train, _ = split_samples(data.info, config)
    order = sampling_of(config.data, data.train, train).batches(train, config.train.seed, 0, 64)
    return sorted(samples_of(order)[step - 1].tolist())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without") / "run"
    train_in(make_world(0, 1), str(folder), FLAGS)
    (folder / "config.yaml").write_text(to_yaml(quick_config(*FLAGS)))
    return folder


@pytest.mark.long
def test_a_replay_equals_a_run_from_scratch(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samples = [*ids_of_step(6)[:5], *ids_of_step(8)[:5]]
    names = ",".join(map(str, samples))
    (tmp_path / "samples.txt").write_text("\n".join(map(str, samples)))
    again, scratch = tmp_path / "again", tmp_path / "scratch"
    assert main(["replay", str(run), "--without", str(tmp_path / "samples.txt"), "--output-dir", str(again)]) == 0
    out = capfd.readouterr().out
    assert "first used at step 6" in out
    assert "from      the checkpoint of step 4: 14 of 18 steps are trained again" in out
    train_in(make_world(0, 1), str(scratch), (*FLAGS, "--exclude", names))
    for name in ("weights_sha256", "optimizer_sha256", "test_loss", "best_epoch"):
        assert read_results(again)[name] == read_results(scratch)[name]
        assert name == "best_epoch" or read_results(again)[name] != read_results(run)[name]
    assert (again / "steps.f64").read_bytes() == (scratch / "steps.f64").read_bytes()
    links, expected = (read_receipt(folder / "receipt.json").links for folder in (again, scratch))
    for link in ("config", "data", "order"):
        assert links[link] == expected[link]
    assert links["order"]["excluded"] == len(samples)
    tensors = [[(row["step"], row["tensors"]) for row in receipt["checkpoints"]] for receipt in (links, expected)]
    assert tensors[0] == tensors[1]
    assert main(["verify", str(again), "--steps", "100"]) == EXIT_FINISHED
    assert "none of the 10 excluded samples" in capfd.readouterr().out


def test_other_labels_are_first_used_with_their_sample(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = ids_of_step(7)[0]
    assert main(["replay", str(run), "--labels", f"{sample}=star", "--dry-run"]) == EXIT_FINISHED
    assert "from      the checkpoint of step 6" in capsys.readouterr().out
    for wrong in (f"{sample}=dragon", "640=star", "x=star"):
        assert main(["replay", str(run), "--labels", wrong, "--dry-run"]) == EXIT_USER


@pytest.mark.long
def test_a_checkpoint_that_has_used_the_samples_is_refused(run: Path, tmp_path: Path) -> None:
    sample = str(ids_of_step(6)[0])
    newest = max(step_folders(run / "checkpoints"), key=step_of)
    flags = ["--exclude", sample, "--resume", str(newest), "--output-dir", str(tmp_path / "new"), "--processes", "1"]
    assert main(["train", str(run / "config.yaml"), *flags]) == EXIT_CHECKPOINT


def test_bad_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--without", "3,640", "--dry-run"]) == EXIT_USER
    assert "0 to 639" in capsys.readouterr().err
    assert main(["replay", str(run), "--without", "nowhere.txt", "--dry-run"]) == EXIT_USER
    assert main(["replay", str(run), "--dry-run"]) == EXIT_USER
    with pytest.raises(UserError, match="needs uniform sampling"):
        quick_config("--exclude", "3", "--sampling", "balanced")


def test_settings_hold_the_samples_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "samples.txt"
    file.write_text("5 3\n4,9\n20-22\n")
    loaded = load_config("shapes-cnn", ["--exclude", str(file)])
    assert loaded.config.data.exclude == read_excluded("3-5,9,20-22", "") == "3-5,9,20-22"
    file.write_text("7,star\n3, 0\n")
    assert read_relabelled(str(file), "") == "3=0,7=star"
    for wrong in ("5-3", "1,,2", "-4"):
        with pytest.raises(UserError):
            read_excluded(wrong, "")


def test_samples_of_an_earlier_replay_stay_out(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another --without adds to the samples that the run excludes. It does not bring them back."""
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    early, late, wrong = ids_of_step(1)[0], ids_of_step(8)[0], ids_of_step(9)[0]
    changed = quick_config(*FLAGS, "--exclude", str(early), "--relabel", f"{early}=star")
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(changed))
    arguments = ["replay", str(tmp_path / "run"), "--without", str(late), "--labels", f"{wrong}=disc", "--dry-run"]
    assert main(arguments) == EXIT_FINISHED
    assert "first used at step 8" in capsys.readouterr().out


def test_no_samples_all_samples_and_two_labels_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    for flag, value in (
        ("--without", str(tmp_path / "empty.txt")),
        ("--labels", str(tmp_path / "empty.txt")),
        ("--without", "0-639"),
        ("--labels", "3=star,3=disc"),
    ):
        assert main(["replay", str(run), flag, value, "--dry-run"]) == EXIT_USER


def test_only_the_places_of_excluded_samples_change() -> None:
    ids, excluded = torch.arange(100), torch.zeros(100, dtype=torch.bool)
    excluded[[3, 50]] = True
    for epoch in range(3):
        before = Sampling(100).batches(ids, 1, epoch, 10)
        after = Sampling(100, excluded=excluded).batches(ids, 1, epoch, 10)
        is_out = (before == 3) | (before == 50)
        assert int(is_out.sum()) == 2
        assert torch.equal(before[~is_out], after[~is_out])
        assert not torch.isin(samples_of(after), torch.tensor([3, 50])).any()
        assert len(after.unique()) == 100  # a second visit has a repetition number of its own
