"""Evaluation counts every sample once, on any number of ranks, for all sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.ranks import make_world, run_ranks
from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo, ResidentDataset
from paceline.data.loader import Loader
from paceline.parallel.apply import ParallelModel
from paceline.parallel.buffers import average_statistics
from paceline.parallel.collectives import broadcast_text, gather_texts
from paceline.runtime.detect import World
from paceline.settings.schema import DataConfig
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.objective import Objective, UserFunction
from paceline.training.scores import score_classes

CLASSES = 3


def samples_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    vectors = torch.randn(size, 5, generator=generator)
    return vectors, torch.randint(0, CLASSES, (size,), generator=generator)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, CLASSES)


def is_small(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits[:, 0] < labels).float()


def evaluate_on(world: World, size: int, batch_size: int) -> Evaluation:
    vectors, labels = samples_of(size)
    info = DatasetInfo("test", size, size, ("a", "b", "c"), (5,))
    pipeline = build_pipeline(DataConfig(augment="none"), info, 0)
    loader = Loader(ResidentDataset(vectors, labels), torch.arange(size), pipeline, world)
    module = build()
    model = ParallelModel(module, module, "single", None)
    objective = Objective(metrics={"is_small": UserFunction("is_small", is_small)})
    return evaluate(model, loader, world, num_classes=CLASSES, batch_size=batch_size, objective=objective)


@pytest.mark.parametrize(("size", "batch_size"), [(7, 2), (10, 3), (3, 8), (2, 1), (101, 10)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sample_once(size: int, batch_size: int, world_size: int) -> None:
    vectors, labels = samples_of(size)
    logits = build()(vectors)
    expected = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for label, answer in zip(labels, logits.argmax(1), strict=True):
        expected[label, answer] += 1
    for result in run_ranks(world_size, evaluate_on, size, batch_size):
        assert result.samples == size
        assert result.confusion == expected.tolist()
        assert result.accuracy == expected.trace().item() / size
        assert result.metrics["is_small"] == is_small(logits, labels).sum().item() / size
        assert list(result.metrics) == ["balanced_accuracy", "f1", "is_small"]
        # Another order of float64 additions.
        assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def test_class_without_samples_has_no_accuracy() -> None:
    found = score_classes(torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 0]]), [])
    assert found.per_class["accuracy"] == [0.5, None, None]


def number_of_batches(size: int, batch_size: int, world_size: int, rank: int) -> int:
    vectors, labels = samples_of(size)
    info = DatasetInfo("test", size, size, ("a", "b", "c"), (5,))
    pipeline = build_pipeline(DataConfig(augment="none"), info, 0)
    loader = Loader(ResidentDataset(vectors, labels), torch.arange(size), pipeline, make_world(rank, world_size))
    return len(list(loader.evaluation_batches(batch_size)))


def test_ranks_have_the_same_number_of_forward_passes() -> None:
    # Sharded models exchange weights in each pass: a rank with one batch fewer would hang the others.
    for size, batch_size, world_size in [(7, 2, 3), (5, 1, 4), (2, 1, 4), (9, 4, 2)]:
        counts = {number_of_batches(size, batch_size, world_size, rank) for rank in range(world_size)}
        assert len(counts) == 1


def talk(world: World) -> tuple[list[str], str, float]:
    norm = nn.BatchNorm1d(2)
    assert norm.running_mean is not None
    norm.running_mean.fill_(float(world.rank))
    average_statistics(norm, world)
    texts = gather_texts("é" * world.rank, world)
    return texts, broadcast_text(f"from {world.rank}", world), float(norm.running_mean[0])


def test_collectives() -> None:
    for texts, text, mean in run_ranks(3, talk):
        assert texts == ["", "é", "éé"]
        assert text == "from 0"
        assert mean == 1.0
