"""Random numbers from generators: initial weights, and random operations of external models.

The generators are set anew before every step from (seed, step, rank), so there is no generator state
to save and a resumed run draws what the undisturbed one would have drawn. Our own models draw no numbers from
generators in a step (models/dropout.py).
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads neighbouring numbers apart


def seed_initial_weights(seed: int) -> None:
    """The same on every rank, so that every rank builds the same model."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Different on every rank and step, and a function of nothing else."""
    number = (seed * _GOLDEN + step * 1_000_003 + rank) % 2**63
    # Not torch.manual_seed: for every kind of device that is not there it keeps a traceback, in a third of a
    # millisecond each.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def require_determinism() -> None:
    """Only kernels that give the same bits every time; an operation without one raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
