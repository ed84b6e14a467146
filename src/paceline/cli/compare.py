"""`paceline compare`: whether runs are bit-for-bit equal, or where they first differ."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.cli.command import Command
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError
from paceline.settings.declare import Arg


@dataclass(frozen=True)
class Compare:
    """Show whether runs are equal, or where each first differs from the first run. Exit code 0: equal, 1: different.

    Compared are weights, optimizer, losses of steps, metrics of epochs, and every tensor of their newest common
    checkpoint.
    """

    run: Annotated[tuple[str, ...], Arg(place="word", completes="run")]
    """Run folders, or their names in runs/."""
    json: bool = False
    """Print JSON."""
    html: Annotated[Path | None, Arg("PAGE.html", bare="compare.html", bare_unless=(".html", ".htm"))] = None
    """Also write a page with their curves (compare.html, unless another is given)."""


def compare(settings: Compare) -> int:
    from paceline.library.compare import compare as compare_runs  # imported late: --help must be fast

    page = settings.html
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        hint = "--html=FOLDER/PAGE.html, in an existing folder"
        raise UserError("the page cannot be written there", got=page, hint=hint)
    found = compare_runs(settings.run)
    print(json.dumps(found.to_json(), indent=2) if settings.json else found)
    if page is not None:
        found.write_page(page)
        print(f"\nthe page is {page}", file=sys.stderr if settings.json else sys.stdout)
    return EXIT_FINISHED if found.is_equal else EXIT_DIFFERENT


COMMANDS = (Command("compare", Compare, compare),)
