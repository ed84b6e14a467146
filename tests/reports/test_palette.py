"""Colours of charts: distinguishable with every kind of colour vision, in light and dark."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

STYLE = Path(__file__).resolve().parents[2] / "src" / "paceline" / "reports" / "assets" / "page.css"
# Linear red, green and blue as seen without one kind of cone (Machado, Oliveira, Fernandes 2009).
EYES: dict[str, Any] = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
Colour = list[float]


def linear(code: str) -> Colour:
    parts = [int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def through(matrix: list[list[float]], colour: Colour) -> Colour:
    return [sum(a * b for a, b in zip(row, colour, strict=True)) for row in matrix]


def lab(colour: Colour) -> Colour:
    xyz = through([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]], colour)
    shares = [max(value, 0) / white for value, white in zip(xyz, (0.9505, 1, 1.089), strict=True)]
    x, y, z = (share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def read_colours(dark: bool) -> dict[str, Colour]:
    found = re.findall(r"--(s\d|card): light-dark\((#\w{6}), (#\w{6})\)", STYLE.read_text())
    return {name: linear(codes[dark]) for name, *codes in found}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_series_are_distinguishable_with_every_colour_vision(dark: bool) -> None:
    colours = read_colours(dark)
    card = colours.pop("card")
    assert len(colours) == 8
    for eye, matrix in EYES.items():
        seen = {name: lab(through(matrix, colour)) for name, colour in colours.items()}
        for a, b in itertools.combinations(seen, 2):
            distance = sum((p - q) ** 2 for p, q in zip(seen[a], seen[b], strict=True)) ** 0.5
            assert distance > 14, f"{a} and {b} with {eye} vision"  # 2 is what can just be noticed
    for name, colour in colours.items():
        levels = sorted(0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2] for c in (colour, card))
        assert (levels[1] + 0.05) / (levels[0] + 0.05) >= 3, f"{name} on its card"  # WCAG's least for graphics
