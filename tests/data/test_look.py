"""Facts of a data set, and model inputs as pictures: the same values that training uses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.loader import Loader
from paceline.data.look import choose_samples, look_at_data, original
from paceline.data.preview import to_pixels, training_inputs
from paceline.data.registry import load_dataset
from paceline.data.sampling import Sampling
from paceline.runtime.detect import World
from paceline.settings.schema import DataConfig
from paceline.settings.tasks import MULTI_LABEL, REGRESSION, SINGLE_LABEL

ONE = World(0, 1, 0, 1, "a test", "here", "cpu", "gloo", 1)


class NoProgress:
    def start(self, total: int, done: int) -> None:
        pass

    def advance(self, by: int) -> None:
        pass


def arrays(num_train: int = 40) -> LoadedData:
    random = torch.Generator().manual_seed(1)
    train, test = (torch.randint(256, (count, 3, 16, 16), generator=random).byte() for count in (num_train, 10))
    info = DatasetInfo("made", num_train, 10, ("a", "b"), (3, 16, 16), (0.5, 0.4, 0.3), (0.2, 0.2, 0.3))
    return LoadedData(
        info, ResidentDataset(train, torch.arange(num_train) % 2), ResidentDataset(test, torch.arange(10) % 2)
    )


def test_only_equal_samples_in_training_and_test_are_reported() -> None:
    data = arrays()
    assert isinstance(data.train, ResidentDataset)
    assert isinstance(data.test, ResidentDataset)
    data.test.samples[3] = data.train.samples[8]  # class b in the test, class a in training
    data.train.samples[5] = data.train.samples[7]
    data.train.samples[30] = data.train.samples[2]  # a validation sample
    train_ids, validation_ids = torch.arange(30), torch.arange(30, 40)
    facts = look_at_data(data, train_ids, validation_ids, workers=1, progress=NoProgress())
    found = [{(place.part, place.index) for place in group} for group in facts.leaks]
    assert found == [{("train", 2), ("validation", 30)}, {("train", 8), ("test", 3)}]
    assert [{place.label for place in group} for group in facts.conflicts] == [{"a", "b"}]
    assert facts.repeats == 1
    assert facts.num_checked == 50
    assert facts.per_class == {"train": [15, 15], "validation": [5, 5], "test": [5, 5]}
    assert facts.sizes == {(16, 16): 50}


def test_mean_and_deviation_are_those_of_the_training_samples() -> None:
    data = arrays(600)  # more than one chunk
    assert isinstance(data.train, ResidentDataset)
    facts = look_at_data(data, torch.arange(500), torch.arange(500, 600), workers=1, progress=None)
    pixels = data.train.samples[:500].double() / 255
    # Sums in another order: up to rounding.
    assert facts.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), rel=1e-12)
    assert facts.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), rel=1e-10)
    assert (facts.num_measured, facts.num_checked) == (500, 0)


@pytest.mark.parametrize("mixed", [{}, {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}], ids=["plain", "mixed"])
def test_a_shown_input_equals_the_input_of_the_loader(mixed: dict[str, float]) -> None:
    data = arrays()
    config = DataConfig(augment="light", policy="trivial", **mixed)  # type: ignore[arg-type]
    pipeline = build_pipeline(config, data.info, 7)
    loader = Loader(data.train, torch.arange(40), pipeline, ONE)
    for epoch in (0, 3):
        batches = Sampling(40).batches(torch.arange(40), 7, epoch, 12)
        for batch in loader.train_epoch(seed=7, epoch=epoch, global_batch_size=12, first_step=0):
            for place, sample in enumerate(batch.ids.tolist()):
                (shown,) = training_inputs(data.train, pipeline, batches, sample, epoch)
                assert torch.equal(shown.pixels, to_pixels(batch.inputs[place : place + 1], pipeline)[0])
                target = batch.labels[place]
                assert torch.equal(shown.target, target)
                assert shown.partner == (int(batch.ids[place ^ 1]) if mixed else None)
        left_out = (set(range(40)) - set(batches.flatten().tolist())).pop()
        assert training_inputs(data.train, pipeline, batches, left_out, epoch) == []


def test_samples_of_many_classes_are_chosen() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    assert choose_samples(labels, torch.arange(6), 4, SINGLE_LABEL) == [0, 3, 5, 1]
    assert choose_samples(labels, torch.tensor([1, 2]), 4, SINGLE_LABEL) == [1, 2]
    several = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert choose_samples(several, torch.arange(4), 3, MULTI_LABEL) == [3, 0, 2]  # one of each combination
    numbers = torch.tensor([[5.0], [1.0], [4.0], [2.0], [3.0]])
    assert choose_samples(numbers, torch.arange(5), 3, REGRESSION) == [1, 4, 0]  # small, middle, large


def test_labels_of_other_tasks_are_counted_by_class_or_by_range() -> None:
    data = arrays(8)
    several = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]] * 2)
    assert isinstance(data.train, ResidentDataset)
    train = ResidentDataset(data.train.samples, several)
    test = ResidentDataset(data.train.samples[:2].clone(), several[1:3])  # the pixels of training, other labels
    labelled = LoadedData(replace(data.info, task=MULTI_LABEL, num_train=8, num_test=2), train, test)
    facts = look_at_data(labelled, torch.arange(8), torch.arange(0), workers=1, progress=NoProgress())
    assert facts.per_class == {"train": [4, 4], "test": [1, 0]}
    assert facts.num_samples == {"train": 8, "test": 2}
    assert [{place.label for place in group} for group in facts.conflicts] == [{"a, b", "a"}, {"a", "no label"}]

    numbers = torch.stack([torch.arange(8.0), torch.full((8,), 3.0)], 1)  # the second is constant
    measured = LoadedData(
        replace(labelled.info, task=REGRESSION),
        ResidentDataset(data.train.samples, numbers),
        ResidentDataset(data.train.samples[:2].clone(), numbers[6:]),
    )
    facts = look_at_data(measured, torch.arange(6), torch.arange(6, 8), workers=1, progress=None)
    first, second = facts.numbers
    assert facts.per_class == {}
    low, mean, deviation, high = first.spread["train"]
    assert (low, mean, high) == (0.0, 2.5, 5.0)
    assert deviation == pytest.approx(1.7078, abs=1e-4)  # a square root
    assert {part: sum(counts) for part, counts in first.per_bin.items()} == {"train": 6, "validation": 2, "test": 2}
    assert first.per_bin["train"][0] == first.per_bin["test"][-1] == 1  # the smallest and the largest value
    assert sum(second.per_bin["train"]) == 6


def test_a_folder_with_a_duplicate_another_format_and_a_damaged_file(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("ant", "bee"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    Image.open(tmp_path / "train" / "ant" / "1.png").save(tmp_path / "test" / "ant" / "same.bmp")
    shutil.copy(tmp_path / "train" / "bee" / "2.png", tmp_path / "train" / "bee" / "again.png")
    damaged = tmp_path / "train" / "bee" / "3.png"
    damaged.write_bytes(damaged.read_bytes()[:100])
    config = DataConfig(dataset="folder", data_dir=str(tmp_path), image_size=16, augment="imagenet", unreadable=9)
    data = load_dataset(config, 0)
    train_ids = torch.arange(len(data.train))
    facts = look_at_data(data, train_ids, torch.arange(0), workers=1, progress=NoProgress())
    assert [{place.name for place in group} for group in facts.leaks] == [{"train/ant/1.png", "test/ant/same.bmp"}]
    assert [name for name, _ in facts.unreadable] == ["train/bee/3.png"]
    assert facts.repeats == 1
    assert facts.sizes == {(30, 20): 4, (30, 21): 5, (30, 22): 5, (30, 23): 3}
    assert original(data.train, 0, 160).size == (30, 20)  # not the central square
    without = look_at_data(data, train_ids, torch.arange(0), workers=1, progress=None)
    assert replace(without, num_checked=0).sizes == {}
