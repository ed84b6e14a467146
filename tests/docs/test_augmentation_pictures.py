"""The pictures of the augmentation guide equal those that the code makes, and the guide shows all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from paceline.data.augment import Extras

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "images" / "augmentation"
# Fields that change how others work, and have no own row.
PARTS = {"crop_scale", "crop_ratio", "interpolation", "policy_ops", "policy_magnitude", "policy_std", "mix_epochs"}


def test_the_pictures_are_current() -> None:
    """If not: python docs/augmentation_pictures.py."""
    command = [sys.executable, "docs/augmentation_pictures.py", "--check"]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guide_shows_every_picture_and_every_augmentation_has_one() -> None:
    guide = (REPOSITORY / "docs" / "guides" / "augmentation.md").read_text()
    shown = re.findall(r"images/augmentation/([a-z-]+)\.png", guide)
    files = {path.stem for path in PICTURES.glob("*.png")}
    assert sorted(shown) == sorted(files)
    assert sum(path.stat().st_size for path in PICTURES.glob("*.png")) < 400_000
    names = {name.replace("_", "-") for name in Extras.__dataclass_fields__ if name not in PARTS}
    assert names - {"policy", "mixing"} <= files
    assert {"light", "gentle", "lively", "imagenet", "resized-crop", "mixup", "cutmix", "cutout"} <= files
    assert {"resolution-schedule", "repeat-augment"} <= files
