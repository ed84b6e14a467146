"""The clock that times the peers on a GPU. A rank with more steps than counted would look too slow."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

PEERS = Path(__file__).parents[3] / "benchmarks" / "gpu_peers.py"


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
