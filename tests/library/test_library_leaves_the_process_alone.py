"""The library runs in its caller's process and does not change the state of that process, also with threads."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from harness.cli import paceline as run_command
from paceline.errors import UserError
from paceline.settings.load import load_config

THREADS = 4
QUICK = ("synthetic-mlp", "--num-samples=640", "--global-batch-size=64", "--epochs=1", "--processes=1", "--track")
SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run under --exact, which needs deterministic kernels."""
    folder = tmp_path_factory.mktemp("run")
    answer = run_command("train", *QUICK, "--exact", "--output-dir=run", cwd=folder)
    assert answer.code == 0, answer
    return folder / "run"


def state_of_process() -> dict[str, Any]:
    """The state of the process that a library could change."""
    log = logging.getLogger("paceline")
    return {
        "streams": (sys.stdout, sys.stderr, sys.stdin, sys.excepthook, threading.excepthook),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "paths": list(sys.path),
        "signals": {number: signal.getsignal(number) for number in SIGNALS},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "kernels": (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        "defaults": (torch.get_default_dtype(), torch.is_grad_enabled()),
        "logging": (log.level, log.propagate, list(log.handlers), list(logging.root.handlers), logging.root.level),
        "warnings": list(warnings.filters),
        "recursion": sys.getrecursionlimit(),
    }


def at_once(function: Any) -> list[Any]:
    """Call it in many threads at the same time."""
    barrier = threading.Barrier(THREADS)

    def call(number: int) -> Any:
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, range(THREADS)))


def use_run(folder: Path) -> float:
    run = paceline.load_run(folder)
    run.model()
    return run.evaluate().loss


def test_one_caller(folder: Path) -> None:
    """Reading, building the model, evaluating, a refused request and a complete training."""
    torch.set_num_threads(2)
    before = state_of_process()
    use_run(folder)
    assert state_of_process() == before
    with pytest.raises(UserError):
        paceline.train("synthetic-mlp", epochs="many")
    assert state_of_process() == before
    run = paceline.train(
        *QUICK[:1], num_samples=640, global_batch_size=64, processes=1, epochs=1, track=(), quiet=True,
        output_dir=folder.parent / "other",
    )  # fmt: skip
    assert run.status == "finished"
    assert state_of_process() == before


def test_threads_that_evaluate(folder: Path) -> None:
    before = state_of_process()
    expected = use_run(folder)
    assert at_once(lambda _: use_run(folder)) == [expected] * THREADS
    assert state_of_process() == before


def test_threads_that_parse(capfd: pytest.CaptureFixture[str]) -> None:
    """Valid and refused values in turn. Nothing is printed, and every thread gets its own value."""
    before = state_of_process()

    def parse(number: int) -> list[int | str]:
        seeds: list[int | str] = []
        for turn in range(5):
            seeds.append(load_config("synthetic-mlp", [f"--seed={100 * number + turn}"]).config.train.seed)
            try:
                load_config("synthetic-mlp", [f"--epochs=x{number}"])
            except UserError as error:
                seeds.append(error.what)
        return seeds

    for number, seeds in enumerate(at_once(parse)):
        assert seeds[::2] == [100 * number + turn for turn in range(5)]
        assert all(f"x{number}" in str(what) for what in seeds[1::2])
    assert state_of_process() == before
    assert capfd.readouterr() == ("", "")
