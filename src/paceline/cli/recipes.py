"""`paceline recipes`: the recipes that come with paceline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.cli.command import Command
from paceline.errors import EXIT_FINISHED
from paceline.settings.recipe_file import shipped_recipes


@dataclass(frozen=True)
class Recipes:
    """List the recipes that come with paceline."""


def recipes(settings: Recipes) -> int:
    for name, path in shipped_recipes().items():
        print(f"{name:<18} {_headline(path)}")
    return EXIT_FINISHED


def _headline(path: Path) -> str:
    """The first comment line of a recipe describes it."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()


COMMANDS = (Command("recipes", Recipes, recipes),)
