"""A rank that trains from a folder of pictures; in a file of its own, which imports nothing that decodes."""

from __future__ import annotations

import sys

from harness.runs import train_in
from paceline.runtime.detect import World


def train_on_pictures(world: World, folder: str, data: str, image_size: int) -> tuple[str, list[str]]:
    """The weights' hash, and which of our modules about data the rank has needed for it."""
    flags = ("--dataset=folder", f"--data-dir={data}", f"--image-size={image_size}", "--global-batch-size=16")
    results = train_in(world, folder, (*flags, "--epochs=1"))
    return results["weights_sha256"], [name for name in sys.modules if name.startswith("paceline.data")]
