"""Seeds of generators: for initial weights, and for random operations of external models and user functions.

The generators are seeded before every step from (seed, step, rank). There is no generator state to save, and a
resumed run draws the same numbers as an uninterrupted one. Built-in models draw no numbers from generators in a
step (models/dropout.py).
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: maps close numbers to distant ones


def seed_initial_weights(seed: int) -> None:
    """The same on every rank, so that every rank builds the same model."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, rank: int, *, has_user_code: bool = False) -> None:
    """A function of seed, step and rank only, different for each.

    has_user_code: also Python's and numpy's generators, which nothing of ours uses in a step.
    """
    number = (seed * _GOLDEN + step * 1_000_003 + rank) % 2**63
    # Not torch.manual_seed: for every absent device type it stores a traceback, which takes a third of a millisecond.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    if has_user_code:
        random.seed(number)
        np.random.seed(number % 2**32)


def require_determinism() -> None:
    """Allow only deterministic kernels. An operation without one raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
