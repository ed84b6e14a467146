"""`paceline recipes`: what can be trained out of the box."""

from __future__ import annotations

from pathlib import Path

from paceline.settings.recipe_file import shipped_recipes


def run(arguments: list[str]) -> int:
    for name, path in shipped_recipes().items():
        print(f"{name:<18} {_headline(path)}")
    return 0


def _headline(path: Path) -> str:
    """The first comment line of a recipe says what it is."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
