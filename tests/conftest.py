"""Settings and fixtures of all tests. One thread per process: the number of threads changes bits of a result."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from harness.browser import CHROMIUM, Browser
from harness.faulty_s3 import FaultyS3, faulty_s3

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
# A shell lets a background command ignore Ctrl-C. The processes that the tests start would inherit this.
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


@pytest.fixture(scope="module", autouse=True)
def needed_packages(request: pytest.FixtureRequest) -> None:
    """A test file lists in NEEDS its packages of .venv-flows. Without them its tests skip, or fail if required."""
    missing = [name for name in getattr(request.module, "NEEDS", ()) if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"not installed: {', '.join(missing)} (`make test-flows` installs them)"
    if os.environ.get("PACELINE_REQUIRE_FLOWS"):
        pytest.fail(f"{reason}, and PACELINE_REQUIRE_FLOWS is set")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all browser tests. Without one they skip, unless PACELINE_REQUIRE_BROWSER is set."""
    if CHROMIUM is None and not os.environ.get("PACELINE_REQUIRE_BROWSER"):
        pytest.skip("no chromium here: tests/harness/install-browser installs one")
    with Browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    """An S3 server of this module, in which tests inject faults. It needs the packages of .venv-flows."""
    with faulty_s3() as store:
        yield store
