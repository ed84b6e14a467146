"""A rank that trains from a folder of pictures. This file imports nothing that decodes pictures."""

from __future__ import annotations

import sys

from harness.runs import train_in
from paceline.runtime.detect import World


def train_on_pictures(world: World, folder: str, data: str, image_size: int) -> tuple[str, list[str]]:
    """Return the hash of the weights, and the data modules that the rank has imported."""
    flags = ("--dataset=folder", f"--data-dir={data}", f"--image-size={image_size}", "--global-batch-size=16")
    results = train_in(world, folder, (*flags, "--epochs=1"))
    return results["weights_sha256"], [name for name in sys.modules if name.startswith("paceline.data")]
