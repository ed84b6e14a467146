"""One Chromium for all browser tests. Without one they skip, unless PACELINE_REQUIRE_BROWSER says it must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.browser import CHROMIUM, Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None and not os.environ.get("PACELINE_REQUIRE_BROWSER"):
        pytest.skip("no chromium here: tests/browser/install brings one")
    with Browser() as chromium:
        yield chromium
