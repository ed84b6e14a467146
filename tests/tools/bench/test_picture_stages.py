"""The stages of encoded pictures are measured alone, and compared with what a step needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from harness.cli import paceline
from harness.ranks import make_world
from paceline.data.augment import build_pipeline
from paceline.data.loader import Loader
from paceline.data.registry import load_dataset
from paceline.settings.schema import DataConfig
from paceline.tools.bench.pictures import measure_pictures


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for half, count in (("train", 24), ("test", 4)):
        for name in ("ant", "bee"):
            (root / half / name).mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(np.full((40, 50, 3), number, np.uint8))
                image.save(root / half / name / f"{number}.jpg")
    return root


@pytest.mark.parametrize("crop_from", ["square", "picture"])
def test_every_stage_has_a_rate(pictures: Path, crop_from: str) -> None:
    config = DataConfig("folder", data_dir=str(pictures), image_size=16, augment="resized-crop", crop_from=crop_from)  # type: ignore[arg-type]
    data, world = load_dataset(config, 0), make_world(0, 1)
    loader = Loader(data.train, torch.arange(48), build_pipeline(config, data.info, 0), world)
    found = measure_pictures(loader, world, seconds=0.05)
    assert found is not None
    assert found.threads == config.num_workers
    assert min(found.read_per_s, found.decode_per_s, found.crop_per_s, found.copy_per_s) > 0


def test_other_data_has_no_stages() -> None:
    config, world = DataConfig(num_samples=20), make_world(0, 1)
    data = load_dataset(config, 0)
    loader = Loader(data.train, torch.arange(20), build_pipeline(config, data.info, 0), world)
    assert measure_pictures(loader, world, seconds=0.05) is None


@pytest.mark.long
def test_bench_compares_the_stages_with_the_step(pictures: Path, tmp_path: Path) -> None:
    flags = ["--dataset=folder", f"--data-dir={pictures}", "--image-size=16", "--augment=resized-crop"]
    more = ["--crop-from=picture", "--global-batch-size=16", "--what=data,step", "--seconds-per-size=0.01"]
    answer = paceline("bench", "shapes-cnn", *flags, *more, "--processes=1", cwd=tmp_path)
    assert answer.code == 0
    lines = {line.split()[0]: line for line in answer.out.splitlines() if line}
    assert all(word in lines["pictures/s"] for word in ("read", "decode", "crop", "copy"))
    assert "a step needs" in lines["pictures"]
