"""A model that is wrong ends the run in its first attempt, with the line of the user's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.errors import EXIT_USER, UserError

MODELS = """
import torch
from torch import nn


class Net(nn.Linear):
    def __init__(self, num_classes, answer):
        super().__init__(6, num_classes)
        self.answer = answer

    def forward(self, inputs):
        return self.answer(self, super().forward(inputs), inputs)  # the line of the answer is below


def fail(text):
    raise ValueError(text)


def two_outputs(num_classes):
    return Net(num_classes, lambda net, logits, inputs: (logits, inputs))


def a_dict(num_classes):
    return Net(num_classes, lambda net, logits, inputs: {"logits": logits})


def two_outputs_in_evaluation(num_classes):
    return Net(num_classes, lambda net, logits, inputs: logits if net.training else (logits, inputs))


def other_outputs_in_evaluation(num_classes):
    return Net(num_classes, lambda net, logits, inputs: logits if net.training else logits[:, None])


def fails(num_classes):
    return Net(num_classes, lambda net, logits, inputs: fail("in training"))


def fails_in_evaluation(num_classes):
    return Net(num_classes, lambda net, logits, inputs: logits if net.training else fail("in evaluation"))


def lazy(num_classes):
    return nn.LazyLinear(num_classes)


def without_values(num_classes):
    with torch.device("meta"):
        return nn.Linear(6, num_classes)
"""
QUICK = ("fails", "two_outputs_in_evaluation", "lazy")
DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(120, 6)).astype(np.float32), DRAW.integers(0, 3, 120)
CASES = {
    "two_outputs": "a tuple",
    "a_dict": "a dict",
    "two_outputs_in_evaluation": "a tuple",
    "other_outputs_in_evaluation": "of shape [",
    "fails": "ValueError: in training",
    "fails_in_evaluation": "ValueError: in evaluation",
    "lazy": "weight, a lazy parameter",
    "without_values": "weight, on the meta device",
}


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_a_wrong_model_is_the_users_error_and_is_not_started_again(case: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODELS)
    flags: dict[str, Any] = {"processes": 1, "epochs": 1, "global_batch_size": 32, "augment": "none", "track": ()}
    with pytest.raises(UserError) as refused:
        paceline.train(
            model=f"{tmp_path / 'own.py'}:{case}", data=(X, Y), output_dir=tmp_path / "run", quiet=True, **flags
        )
    assert refused.value.exit_code == EXIT_USER
    assert CASES[case] in str(refused.value.got)
    if case.startswith("fails"):
        line = 1 + MODELS.splitlines().index("    raise ValueError(text)")
        assert refused.value.where == f"{tmp_path / 'own.py'}, line {line}"
    assert len((tmp_path / "run" / "failures.jsonl").read_text().splitlines()) == 1
