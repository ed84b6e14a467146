"""The pinned versions can be installed from a public index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("constraints*.txt"))
PIN = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[0-9][A-Za-z0-9.]*")  # no local versions, such as +cpu


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_pin_is_a_version_of_a_public_index(path: Path) -> None:
    pins = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    wrong = [pin for pin in pins if pin and not PIN.fullmatch(pin)]
    assert wrong == []
    assert any(pins)


def test_both_environments_pin_the_same_torch() -> None:
    torch = {line for path in FILES for line in path.read_text().splitlines() if line.startswith("torch==")}
    assert len(torch) == 1
