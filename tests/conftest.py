"""One thread per process: threads are part of what makes results equal to the bit. And Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
# A shell that starts a command in the background has it ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # the venv of the flow engines has no hypothesis
    from hypothesis import settings

    # The same examples in every run, and no time limit per example: CI machines are slow and shared.
    settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Runs with --exact ask for deterministic kernels in the whole process; the next test starts without."""
    yield
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)
