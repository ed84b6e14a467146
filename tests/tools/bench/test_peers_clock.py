"""The benchmark on a GPU, as far as it needs none: its clock and its flags."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from paceline.settings.load import load_config

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PEERS = BENCHMARKS / "gpu_peers.py"


def test_a_step_after_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # counting needs no GPU
    clock = runpy.run_path(str(PEERS))["Clock"](steps=3, batch=8)
    ticks = [clock.tick() for _ in range(clock.all_steps)]
    assert ticks == [False] * (clock.all_steps - 1) + [True]
    found = clock.images_per_s
    assert found > 0
    with pytest.raises(RuntimeError, match=r"step 14 of 13"):
        clock.tick()
    assert clock.images_per_s == found


def test_every_work_and_strategy_has_valid_flags() -> None:
    gpu = runpy.run_path(str(BENCHMARKS / "gpu.py"))
    works = gpu["chosen_works"]("peers,small,families,vit-b16,resnet50")
    assert len(works) == 3 + 2 + 10 + 2
    for work in works:
        for contender in gpu["OURS"]:
            config = load_config(work.recipe, gpu["flags_of"](work, contender)).config
            assert (config.model.model_name, config.train.global_batch_size) == (work.model, work.batch)
            assert config.parallel.exact is (contender == "exact")
            assert config.train.compile == ("never" if contender == "ddp-plain" else "always")
