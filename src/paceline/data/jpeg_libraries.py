"""The libraries that decode JPEG pictures, and which is installed. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import UserError
from paceline.settings.extras import how_to_install

PILLOW, TURBO = "pillow", "turbo"


def require_library(name: str) -> None:
    """UserError if a run asks for a library that is not installed."""
    if name == TURBO and find_spec("simplejpeg") is None:
        raise UserError(
            "the turbo decoder is not installed",
            where="decoder",
            got=TURBO,
            allowed=PILLOW,
            hint=how_to_install("turbo"),
        )


def no_whole_pictures(got: str) -> UserError:
    return UserError(
        "this data set has no whole pictures to crop",
        where="crop-from",
        got=got,
        allowed="encoded pictures: a folder, a table, archives, or pictures packed with --format encoded",
        hint="--crop-from square",
    )
