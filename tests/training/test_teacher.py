"""Distillation: the teacher's part of the loss, its identity, and teachers that are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.ranks import make_world, run_ranks
from harness.runs import quick_config, read_results, step_losses, train_in
from paceline.checkpoints.store import inspect_checkpoint
from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo
from paceline.errors import CheckpointError, UserError
from paceline.runs.folder import RunFolder
from paceline.settings.load import load_config
from paceline.settings.schema import Config
from paceline.training.components import build_components
from paceline.training.teacher import Distillation, Teacher, name_teacher, open_teacher

SMALL = ("--dataset", "harness.task_data:rare_classes", "--global-batch-size", "32", "--model-name", "mlp")
CLASSES = tuple("abcd")
INFO = DatasetInfo("made", 8, 8, CLASSES, (3, 4, 4), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    run_ranks(1, train_in, str(folder), SMALL)
    (folder / "config.yaml").touch()  # a run that the worker starts has one
    return folder


class Scores(nn.Module):
    """Logits that depend on the pixels, and in training also on dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        answers: torch.Tensor = self.dropout(inputs.flatten(1)) @ self.weight
        return answers


def teacher(**changes: object) -> Teacher:
    given = Teacher("made", Scores(), "0", "single-label", 4, CLASSES, (3, 4, 4), INFO.mean, INFO.std)
    return dataclasses.replace(given, **changes)  # type: ignore[arg-type]


def distillation(given: Teacher, *flags: str, info: DatasetInfo = INFO) -> Distillation:
    config: Config = load_config("shapes-cnn", ["--augment", "none", "--teacher", "made", *flags]).config
    return Distillation(given, config, info, build_pipeline(config.data, info, 0), "cpu")


INPUTS = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(2))
OUTPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def test_soft_targets_are_the_divergence_at_a_temperature() -> None:
    given = teacher()
    answers = INPUTS.flatten(1) @ given.module.get_parameter("weight")
    p, q = (answers / 3).softmax(1), (OUTPUTS / 3).softmax(1)
    expected = 0.25 * 1.5 + 0.75 * 9 * (p * (p / q).log()).sum(1).mean()
    flags = ("--distill-temperature", "3", "--distill-weight", "0.75")
    found = distillation(given, *flags).blend(torch.tensor(1.5), OUTPUTS, INPUTS)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)  # added in another order


def test_hard_targets_are_the_most_likely_class() -> None:
    given = teacher()
    classes = (INPUTS.flatten(1) @ given.module.get_parameter("weight")).argmax(1)
    found = distillation(given, "--distill", "hard", "--distill-weight", "1").blend(torch.tensor(0.0), OUTPUTS, INPUTS)
    assert torch.equal(found, F.cross_entropy(OUTPUTS, classes))


def test_a_teacher_of_several_labels_and_of_numbers() -> None:
    for task in ("multi-label", "regression"):
        given = teacher(task=task)
        answers = (INPUTS.flatten(1) @ given.module.get_parameter("weight")).detach()
        info = dataclasses.replace(INFO, task=task)
        found = distillation(given, "--distill-weight", "1", info=info).blend(torch.tensor(0.0), OUTPUTS, INPUTS)
        binary = F.binary_cross_entropy_with_logits(OUTPUTS, answers.sigmoid())
        assert torch.equal(found, binary if task == "multi-label" else F.mse_loss(OUTPUTS, answers))


def test_the_teacher_gets_pixels_with_its_own_normalisation() -> None:
    """Another normalisation: the same pixels, computed from the raw values."""
    given = teacher(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    seen: list[torch.Tensor] = []
    given.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    distillation(given).blend(torch.tensor(0.0), OUTPUTS, INPUTS)

    def channels(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values).view(1, 3, 1, 1)

    raw = INPUTS * channels(INFO.std) + channels(INFO.mean)
    torch.testing.assert_close(seen[0], (raw - channels(given.mean)) / channels(given.std))


def test_a_teacher_has_no_gradients_and_no_dropout() -> None:
    given = teacher()
    made = distillation(given)
    outputs = OUTPUTS.clone().requires_grad_()
    first, second = (made.blend(torch.tensor(0.0), outputs, INPUTS) for _ in range(2))
    assert torch.equal(first, second)
    first.backward()
    assert outputs.grad is not None
    assert given.module.get_parameter("weight").grad is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"classes": tuple("abce")}, "other classes"),
        ({"classes": None, "num_classes": 1000, "input_shape": None}, "other classes"),
        ({"task": "multi-label"}, "another task"),
        ({"input_shape": (3, 8, 8)}, "another shape"),
    ],
)
def test_an_incompatible_teacher_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text):
        distillation(teacher(**changes))


@pytest.mark.long
def test_one_and_two_ranks_and_a_resumed_run_are_equal(tmp_path: Path, teacher_run: Path) -> None:
    alone = (*SMALL, "--exact", "--lanes", "2", "--mixup-alpha", "0.2", "--augment", "light", "--model-name", "cnn")
    flags: tuple[str, ...] = (*alone, "--teacher", str(teacher_run), "--distill-temperature", "2")
    for size in (1, 2):
        run_ranks(size, train_in, str(tmp_path / str(size)), flags)
    run_ranks(1, train_in, str(tmp_path / "stopped"), (*flags, "--max-steps", "3"))
    run_ranks(2, train_in, str(tmp_path / "stopped"), flags, True)
    found = [read_results(tmp_path / name) for name in ("1", "2", "stopped")]
    assert len({(results["weights_sha256"], results["optimizer_sha256"]) for results in found}) == 1
    assert step_losses(tmp_path / "1") == step_losses(tmp_path / "2")
    run_ranks(1, train_in, str(tmp_path / "alone"), alone)
    assert read_results(tmp_path / "alone")["weights_sha256"] != found[0]["weights_sha256"]


def test_the_hash_of_the_teacher_is_part_of_the_run(tmp_path: Path, teacher_run: Path) -> None:
    flags = (*SMALL, "--teacher", str(teacher_run), "--max-steps", "2")
    run_ranks(1, train_in, str(tmp_path / "run"), flags)
    checkpoint = inspect_checkpoint((RunFolder(tmp_path / "run").checkpoints / "latest").resolve())
    digest = open_teacher(str(teacher_run)).sha256
    assert checkpoint.state["config"]["teacher_sha256"] == digest
    config = quick_config(*flags)
    assert name_teacher(config).objective.teacher_sha256 == digest
    other = dataclasses.replace(config, objective=dataclasses.replace(config.objective, teacher_sha256="0" * 64))
    with pytest.raises(UserError, match="not the teacher"):
        name_teacher(other)
    without = quick_config(*SMALL)
    with pytest.raises(CheckpointError) as refused:
        build_components(without, make_world(0, 1), checkpoint=checkpoint)
    assert "teacher" in str(refused.value.got)
