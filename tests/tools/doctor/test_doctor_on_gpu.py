"""The doctor on a machine with a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.cli import paceline
from paceline.training.known_training import KNOWN_HASH, train_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]


def test_a_gpu_gets_the_known_weights() -> None:
    assert train_alone("cuda:0") == KNOWN_HASH


def test_one_rank_on_one_gpu_is_healthy_and_too_many_are_refused(tmp_path: Path) -> None:
    flags = ["doctor", "--device=cuda", "--json"]
    answer = paceline(*flags, "--processes=1", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert answer.code == 0, answer
    found = {finding["name"]: finding for finding in json.loads(answer.out)["findings"]}
    assert found["devices"]["what"].startswith("1 x ")
    assert found["training"]["details"]["alone"] == [KNOWN_HASH]
    crowded = paceline(*flags, "--processes=2", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert crowded.code == 1
    assert "2 ranks, but 1 GPU" in crowded.out
