"""The data is part of a run's identity: a resume has the data of the training, or an error names the difference."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness import changing_data
from harness.ranks import make_world
from harness.runs import quick_config, train_in
from paceline.checkpoints.store import open_checkpoint
from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.fingerprint import (
    are_samples_changed,
    differences,
    fingerprint_of,
    pack_keys,
    sample_keys,
    unpack_keys,
)
from paceline.data.pictures import DECODER
from paceline.data.registry import load_dataset
from paceline.data.sources import custom
from paceline.errors import CheckpointError
from paceline.runs.epoch_clock import EpochClock
from paceline.runtime.detect import World
from paceline.settings.schema import DataConfig
from paceline.training.components import Components, build_components
from paceline.training.run_data import RunData
from paceline.training.state import TrainState

FLAGS = ("--dataset=harness.changing_data:load", "--augment=none", "--global-batch-size=32", "--save-steps=4")


def change(folder: Path, **variant: Any) -> None:
    (folder / "variant.json").write_text(json.dumps(variant))
    custom.load.cache_clear()  # only a new process would call the function again


def flags_for(folder: Path, *more: str) -> tuple[str, ...]:
    return (*FLAGS, f"--data-dir={folder}", *more)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped in its first epoch."""
    folder = tmp_path_factory.mktemp("begun")
    custom.load.cache_clear()
    train_in(make_world(0, 1), str(folder / "run"), flags_for(folder, "--max-steps=4"))
    return folder


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A copy of it, for changes of its data."""
    shutil.copytree(begun / "run", tmp_path / "run", symlinks=True)
    change(tmp_path)
    return tmp_path


def resume_run(folder: Path, *more: str, world: World | None = None) -> dict[str, Any]:
    return train_in(world or make_world(0, 1), str(folder / "run"), flags_for(folder, "--max-steps=8", *more), True)


def newest_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(max((folder / "run" / "checkpoints").glob("step-*/state.json")).read_text())
    return state


def test_the_same_data_is_the_same_run(run: Path) -> None:
    """Another folder or other file times are the same data. The run folder records the data."""
    resume_run(run)
    said = json.loads((run / "run" / "data.json").read_text())
    assert said["fingerprint"] == newest_state(run)["data"]["fingerprint"]
    assert said["fingerprint"]["train"]["samples"] == changing_data.SAMPLES
    assert said["accepted"] == []


@pytest.mark.parametrize(
    "variant",
    [
        *({"labels": True}, {"order": 1}, {"front": 8}, {"fewer": 8}, {"pixel": True}, {"classes": True}),
        *({"test": True}, {"all": True}),
    ],
    ids=lambda variant: next(iter(variant)),
)
def test_other_data_is_refused(run: Path, variant: dict[str, Any]) -> None:
    """Labels, order, length, one bit of one picture, class names, the test set: each one separately."""
    change(run, **variant)
    before = sorted(path.name for path in (run / "run" / "checkpoints").iterdir())
    with pytest.raises(CheckpointError) as caught:
        resume_run(run)
    assert "this is not the data" in caught.value.what
    assert caught.value.got
    assert "--accept-new-data" in str(caught.value.hint)
    assert sorted(path.name for path in (run / "run" / "checkpoints").iterdir()) == before


def test_accepted_data_is_recorded_and_stays_accepted(run: Path) -> None:
    """The next resume does not need the flag."""
    change(run, labels=True)
    resume_run(run, "--accept-new-data")
    accepted = newest_state(run)["data"]["accepted"]
    assert [entry["step"] for entry in accepted] == [4]
    assert accepted == json.loads((run / "run" / "data.json").read_text())["accepted"]
    resume_run(run, "--max-steps=10")


@pytest.mark.parametrize("variant", [{"order": 3}, {"front": 40}, {"fewer": 16}], ids=lambda v: next(iter(v)))
def test_trained_samples_never_become_validation_samples(run: Path, variant: dict[str, Any]) -> None:
    """For any new order and length, and also at a later resume."""
    config = quick_config(*flags_for(run))
    before = parts_of(build_components(config, make_world(0, 1)))
    change(run, **variant)
    for steps in (8, 12):
        resume_run(run, "--accept-new-data", f"--max-steps={steps}")
        data = newest_state(run)["data"]
        assert data["split"] == "keys"
        train, validation = parts_again(run, data)
        assert not validation & before[0]
        assert validation <= before[1]
        assert before[0] & everything(run) <= train
        assert validation


def parts_of(components: Components) -> tuple[set[int], set[int]]:
    keys = sample_keys(load_dataset(components.plan.config.data, 0).train)
    assert keys is not None
    return set(keys[components.train_data.ids].tolist()), set(keys[components.validation_data.ids].tolist())


def parts_again(folder: Path, data: dict[str, Any]) -> tuple[set[int], set[int]]:
    """The parts of components that resume from the newest checkpoint."""
    from paceline.checkpoints.store import open_checkpoint

    newest = open_checkpoint(max((folder / "run" / "checkpoints").glob("step-*")))
    components = build_components(quick_config(*flags_for(folder)), make_world(0, 1), checkpoint=newest)
    assert components.plan.num_train == len(components.train_data)
    assert components.plan.num_validation == len(components.validation_data)
    assert components.data.to_json() == data
    return parts_of(components)


def everything(folder: Path) -> set[int]:
    keys = sample_keys(load_dataset(quick_config(*flags_for(folder)).data, 0).train)
    assert keys is not None
    return set(keys.tolist())


def test_data_without_a_known_validation_sample_is_refused_even_if_accepted(run: Path) -> None:
    """No sample would be left that the run has surely not trained on."""
    change(run, all=True)
    with pytest.raises(CheckpointError) as caught:
        resume_run(run, "--accept-new-data")
    assert "validation" in caught.value.what


def test_a_checkpoint_without_a_fingerprint_is_accepted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is from an earlier version. The next checkpoint has a fingerprint."""
    original = Components.state_json

    def without(self: Components, *arguments: Any, **more: Any) -> dict[str, Any]:
        return {name: value for name, value in original(self, *arguments, **more).items() if name != "data"}

    shutil.rmtree(run / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Components, "state_json", without)
        train_in(make_world(0, 1), str(run / "run"), flags_for(run, "--max-steps=4"))
    assert "data" not in newest_state(run)
    resume_run(run)
    assert newest_state(run)["data"]["held_out"]


@pytest.mark.parametrize(
    "damage",
    [None, 3, [], {}, {"fingerprint": {}}, {"split": "x"}, {"held_out": "%"}, {"held_out": "AAAA"}, {"accepted": 1}],
)
def test_an_unreadable_state_is_our_own_error(damage: Any) -> None:
    """A forged state gives a screen, not a traceback."""
    data = load_dataset(DataConfig(dataset="shapes", num_samples=40), 1)
    good = RunData(fingerprint_of(data)).to_json()
    with pytest.raises(CheckpointError):
        RunData.from_json({**good, **damage} if isinstance(damage, dict) and damage else damage, "here")
    assert RunData.from_json(good, "here").to_json() == good


# --- Fingerprints


def resident(samples: torch.Tensor, labels: torch.Tensor) -> LoadedData:
    info = DatasetInfo("made", len(samples), len(samples), ("a", "b"), tuple(samples.shape[1:]))
    return LoadedData(info, ResidentDataset(samples, labels), ResidentDataset(samples, labels))


@pytest.mark.parametrize("shape", [(3, 5, 5), (7,)])
def test_every_value_changes_the_fingerprint(shape: tuple[int, ...]) -> None:
    """Also the last bytes of a sample, and vectors."""
    samples = torch.arange(20 * int(np.prod(shape))).reshape(20, *shape)
    samples = samples.to(torch.uint8) if len(shape) == 3 else samples.float()
    labels = torch.arange(20) % 2
    first = fingerprint_of(resident(samples, labels))
    assert first == fingerprint_of(resident(samples.clone(), labels.clone()))
    other = samples.clone()
    other[(19, *(-1 for _ in shape))] += 1
    assert differences(first, fingerprint_of(resident(other, labels)))
    keys, changed = (sample_keys(ResidentDataset(values, labels)) for values in (samples, other))
    assert keys is not None
    assert changed is not None
    assert (keys != changed).tolist() == [False] * 19 + [True]
    assert len(set(keys.tolist())) == 20
    packed = pack_keys(keys)
    assert packed is not None
    assert unpack_keys(packed).tolist() == sorted(keys.tolist())


def make_pictures(root: Path, per_class: int = 6) -> None:
    random = np.random.default_rng(0)
    for half in ("train", "test"):
        for name in ("cat", "dog"):
            (root / half / name).mkdir(parents=True)
            for number in range(per_class):
                picture = Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8))
                picture.save(root / half / name / f"{number}.png")


def fingerprint_in(folder: Path) -> dict[str, Any]:
    return fingerprint_of(load_dataset(DataConfig(dataset="folder", data_dir=str(folder), image_size=8), 0))


def test_pictures_in_folders_are_identified_by_names_and_sizes(tmp_path: Path) -> None:
    """The path of the folder and its times do not matter. A new picture, another name or another size is detected."""
    make_pictures(tmp_path / "one")
    first = fingerprint_in(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere" / "two")
    os.utime(tmp_path / "elsewhere" / "two" / "train" / "cat" / "0.png", (1, 1))
    assert fingerprint_in(tmp_path / "elsewhere" / "two") == first
    assert fingerprint_in(tmp_path / "elsewhere" / "two" / ".." / "two") == first
    for number, harm in enumerate(
        (
            lambda root: (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "9.png"),
            lambda root: (root / "train" / "cat" / "0.png").write_bytes(b"x"),
            lambda root: (root / "test" / "dog" / "5.png").unlink(),
            lambda root: (root / "train" / "cat").rename(root / "train" / "zebra"),
        )
    ):
        copy = tmp_path / f"harmed-{number}"
        shutil.copytree(tmp_path / "one", copy)
        harm(copy)
        if number == 3:
            (copy / "test" / "cat").rename(copy / "test" / "zebra")
        assert differences(first, fingerprint_in(copy)), number


def test_a_picture_keeps_its_key_when_others_are_added(tmp_path: Path) -> None:
    """The key depends on its name, so it can stay in its split."""
    make_pictures(tmp_path)

    def keys() -> list[int]:
        found = sample_keys(load_dataset(DataConfig(dataset="folder", data_dir=str(tmp_path), image_size=8), 0).train)
        assert found is not None
        return found.tolist()

    before = keys()
    shutil.copy(tmp_path / "train" / "cat" / "0.png", tmp_path / "train" / "cat" / "00.png")
    after = keys()
    assert len(after) == len(before) + 1
    assert set(before) <= set(after)


def test_data_with_its_own_augmentation_is_identified_by_its_labels() -> None:
    """Otherwise every start would be refused."""

    class Noisy:
        labels = torch.arange(30) % 3

        def __len__(self) -> int:
            return 30

        def read(self, indices: torch.Tensor) -> torch.Tensor:
            return torch.randint(0, 256, (len(indices), 3, 4, 4), dtype=torch.uint8)

    def found(labels: torch.Tensor) -> dict[str, Any]:
        noisy = Noisy()
        noisy.labels = labels
        info = DatasetInfo("noisy", 30, 30, ("a", "b", "c"), (3, 4, 4))
        return fingerprint_of(LoadedData(info, noisy, noisy))

    assert not differences(found(Noisy.labels), found(Noisy.labels))
    assert differences(found(Noisy.labels), found(Noisy.labels.flip(0)))


# --- A separate validation set ----------------------------------------------------------------------------------------

OWN = {"validation": [7000, 7040]}


@pytest.fixture
def own_run(tmp_path: Path) -> Path:
    """A stopped run with its own validation set."""
    change(tmp_path, **OWN)
    train_in(make_world(0, 1), str(tmp_path / "run"), flags_for(tmp_path, "--max-steps=4"))
    return tmp_path


def test_a_validation_set_is_used_and_nothing_is_held_out(own_run: Path) -> None:
    components = build_components(quick_config(*flags_for(own_run)), make_world(0, 1))
    assert (components.plan.num_train, components.plan.num_validation) == (changing_data.SAMPLES, 40)
    expected, _ = changing_data._samples(np.arange(*OWN["validation"]))
    validation = load_dataset(components.plan.config.data, 0).validation
    assert validation is not None
    assert torch.equal(validation.read(components.validation_data.ids), torch.from_numpy(expected))
    labels = [label for batch in components.validation_data.evaluation_batches(16) for label in batch.labels.tolist()]
    assert labels == [number % len(changing_data.CLASSES) for number in range(*OWN["validation"])]
    resume_run(own_run)


@pytest.mark.parametrize("now", [{}, {"validation": [7000, 7041]}, {"validation": [7001, 7041]}], ids=str)
def test_another_validation_set_is_refused(own_run: Path, now: dict[str, Any]) -> None:
    change(own_run, **now)
    with pytest.raises(CheckpointError) as caught:
        resume_run(own_run)
    assert "validation samples" in str(caught.value.got)


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ({"validation": [7010, 7060]}, set(range(7010, 7040))),  # some removed, some new
        ({"validation": [7000, 7040], "front": 32}, set(range(7000, 7040))),  # more training samples
    ],
    ids=str,
)
def test_only_old_samples_of_a_changed_validation_set_are_used(
    own_run: Path, now: dict[str, Any], kept: set[int]
) -> None:
    """The run may have trained on the new ones."""
    change(own_run, **now)
    resume_run(own_run, "--accept-new-data")
    data = newest_state(own_run)["data"]
    assert data["split"] == "keys"
    for _ in range(2):
        newest = open_checkpoint(max((own_run / "run" / "checkpoints").glob("step-*")))
        components = build_components(quick_config(*flags_for(own_run)), make_world(0, 1), checkpoint=newest)
        assert {now["validation"][0] + place for place in components.validation_data.ids.tolist()} == kept
        assert components.plan.num_validation == len(kept)
        assert components.plan.num_train == changing_data.SAMPLES + now.get("front", 0)


@pytest.mark.parametrize("now", [{"validation": [0, 40]}, {}], ids=["trained samples", "split again"])
def test_trained_samples_do_not_become_a_validation_set(own_run: Path, now: dict[str, Any]) -> None:
    change(own_run, **now)
    with pytest.raises(CheckpointError) as caught:
        resume_run(own_run, "--accept-new-data")
    assert "validation" in caught.value.what


def test_trained_samples_do_not_become_a_validation_set_of_a_run_without_one(run: Path) -> None:
    """The run has held some samples out. Only those may be used for validation."""
    held_out = build_components(quick_config(*flags_for(run)), make_world(0, 1)).validation_data.ids.tolist()
    change(run, validation=[0, 100])
    resume_run(run, "--accept-new-data")
    newest = open_checkpoint(max((run / "run" / "checkpoints").glob("step-*")))
    components = build_components(quick_config(*flags_for(run)), make_world(0, 1), checkpoint=newest)
    assert components.validation_data.ids.tolist() == [number for number in held_out if number < 100]
    assert not set(components.train_data.ids.tolist()) & set(held_out)


def test_a_val_folder_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    make_pictures(tmp_path)
    first = fingerprint_in(tmp_path)
    shutil.copytree(tmp_path / "test", tmp_path / "val")
    second = fingerprint_in(tmp_path)
    assert differences(first, second)
    assert differences(second, first)
    (tmp_path / "val" / "cat" / "0.png").unlink()
    assert differences(second, fingerprint_in(tmp_path))


def test_pictures_decoded_by_other_rules_are_other_data(tmp_path: Path) -> None:
    """Checkpoints of the first rules do not name them. The same samples stay in their split."""
    make_pictures(tmp_path)
    now = fingerprint_in(tmp_path)
    old = json.loads(json.dumps(now))
    for part in ("train", "test"):
        assert old[part].pop("decoder") == DECODER
    (line,) = differences(old, now)
    assert line.startswith("pixels")
    assert not are_samples_changed(old, now)
    assert not differences(now, fingerprint_in(tmp_path))


# --- Data with another epoch length -----------------------------------------------------------------------------------

WHOLE = ("--train-split=0.9", "--save-steps=0")


def finish_epochs(folder: Path, epochs: int, *more: str, resume: bool = True) -> dict[str, Any]:
    return train_in(
        make_world(0, 1), str(folder / "run"), flags_for(folder, *WHOLE, f"--epochs={epochs}", *more), resume
    )


@pytest.mark.parametrize("variant", [{"front": 320}, {"fewer": 160}], ids=lambda v: next(iter(v)))
def test_epochs_are_counted_further_after_the_epoch_length_changed(tmp_path: Path, variant: dict[str, Any]) -> None:
    """No epoch is recorded twice or skipped, and the next resume counts in the same way."""
    change(tmp_path)
    first = finish_epochs(tmp_path, 2, resume=False)
    change(tmp_path, **variant)
    second = finish_epochs(tmp_path, 3, "--accept-new-data")
    per_epoch = newest_state(tmp_path)["steps_per_epoch"]
    assert per_epoch != first["steps"] // 2
    assert second["steps"] == first["steps"] + per_epoch
    finish_epochs(tmp_path, 4)
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    assert [tuple(line.split(",")[:2]) for line in lines] == [
        *((str(epoch), phase) for epoch in (1, 2, 3, 4) for phase in ("train", "val")),
        ("4", "test"),
    ]


@pytest.mark.parametrize("variant", [{"front": 320}, {"fewer": 160}], ids=lambda v: next(iter(v)))
def test_the_best_checkpoint_is_kept_after_the_epoch_length_changed(
    tmp_path: Path, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at a later resume, which knows only the new number of steps per epoch."""
    change(tmp_path)
    finish_epochs(tmp_path, 2, resume=False)
    best = (tmp_path / "run" / "checkpoints" / "best").readlink()
    change(tmp_path, **variant)
    monkeypatch.setattr(TrainState, "is_improved_by", lambda *_: False)
    finish_epochs(tmp_path, 3, "--accept-new-data")
    assert (tmp_path / "run" / "checkpoints" / "best").readlink() == best
    last = finish_epochs(tmp_path, 4)
    assert (tmp_path / "run" / "checkpoints" / "best").readlink() == best
    assert last["best_epoch"] <= 2


def test_the_best_of_a_checkpoint_without_its_step_is_found(tmp_path: Path) -> None:
    """Checkpoints of older versions have the best epoch and the steps per epoch."""
    state = TrainState(step=27, best_epoch=2, best_step=18).to_json()
    del state["best_step"]
    assert TrainState.from_json({**state, "steps_per_epoch": 9}).best_step == 18


def test_the_header_names_the_training_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After new data was accepted, the checkpoint names them, also at a later resume."""
    change(tmp_path)
    finish_epochs(tmp_path, 1, resume=False)
    change(tmp_path, front=320)
    for epochs, more in ((2, ("--accept-new-data",)), (3, ())):
        capsys.readouterr()
        finish_epochs(tmp_path, epochs, *more)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("data "))
        assert "608 train, 32 validation" in line


def test_a_started_epoch_keeps_its_position_when_its_length_changes() -> None:
    """If the new epoch is shorter than the position, one step of it is left."""
    clock = EpochClock(10)
    assert clock.at_other_length(24, 15).locate(24) == (2, 4)
    assert clock.at_other_length(24, 15).end_of(3) == 35
    assert clock.at_other_length(28, 5).locate(28) == (2, 4)
    assert clock.at_other_length(28, 5).end_of(3) == 29
    assert clock.at_other_length(20, 5).locate(20) == (2, 0)
    assert clock.at_other_length(24, 10) == clock
    later = clock.at_other_length(24, 15)
    assert EpochClock.from_json(later.to_json()) == later
