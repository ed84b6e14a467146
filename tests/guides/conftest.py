"""Clones are removed as soon as possible: each has a venv of more than a gigabyte."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.guides import Newcomer, newcomer


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Newcomer]:
    """A user with a clone for this test only."""
    found = newcomer(tmp_path)
    yield found
    shutil.rmtree(found.clone)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """A user with one clone for all tests of a file, in their order."""
    found = newcomer(tmp_path_factory.mktemp("reader"))
    yield found
    shutil.rmtree(found.clone)
