"""Flow engines and cloud clients live in a venv of their own: elsewhere these tests skip, there they must run."""

from __future__ import annotations

import importlib.util
import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def needed_packages(request: pytest.FixtureRequest) -> None:
    """A test file names in NEEDS what it cannot do without. Under PACELINE_REQUIRE_FLOWS nothing may be missing."""
    missing = [name for name in getattr(request.module, "NEEDS", ()) if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"not installed: {', '.join(missing)} (`make test-flows` brings them)"
    if os.environ.get("PACELINE_REQUIRE_FLOWS"):
        pytest.fail(f"{reason}, and PACELINE_REQUIRE_FLOWS is set")
    pytest.skip(reason)
