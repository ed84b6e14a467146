"""Skip or fail tests if the package of an optional extra is missing."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need_packages(*names: str) -> None:
    """Skip the test unless these packages are installed; fail it under PACELINE_REQUIRE_EXTRAS.

    Only a missing package is skipped. If an installed package cannot be imported, the test fails.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"not installed: {', '.join(missing)} (`make test-extras` installs every extra)"
    if os.environ.get("PACELINE_REQUIRE_EXTRAS"):
        pytest.fail(f"{reason}, and PACELINE_REQUIRE_EXTRAS is set")
    pytest.skip(reason)
