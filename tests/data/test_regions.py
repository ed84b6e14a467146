"""Crops of whole pictures: the same boxes as in a batch, one rule for every picture, equal pixels by each library."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from paceline.data.crops import Crops, random_boxes
from paceline.data.draws import draw_bits
from paceline.data.encoded import EncodedDataset
from paceline.data.jpeg_libraries import PILLOW, TURBO
from paceline.data.picture_files import PictureFiles
from paceline.data.pictures import as_rgb
from paceline.data.regions import decode_region, decode_square
from paceline.errors import DataError

LIBRARIES = (PILLOW, TURBO)


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    if request.param == TURBO:
        pytest.importorskip("simplejpeg")
    return str(request.param)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encode(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def by_pillow(content: bytes, box: tuple[int, int, int, int], side: int, scale: int = 1) -> np.ndarray:
    """Decoded by Pillow at 1/scale, turned upright, cut, and resized by torch."""
    image = Image.open(io.BytesIO(content))
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    top, left, rows, columns = (value // scale for value in box)
    region = torch.from_numpy(np.array(as_rgb(image)))[top : top + rows, left : left + columns]
    resized = F.interpolate(region.permute(2, 0, 1)[None], (side, side), mode="bilinear", antialias=True)
    return resized[0].numpy()


@pytest.mark.parametrize(("height", "width"), [(300, 400), (40, 900), (900, 40), (1, 1), (8, 9)])
def test_a_box_of_one_picture_is_the_box_of_a_batch(height: int, width: int) -> None:
    bits = draw_bits(torch.arange(500), 7)
    crops = Crops(bits, bits > 0, 64, 0.08, 4 / 3, "bilinear")
    boxes = [draw.box_in(height, width) for draw in crops.draws()]
    assert boxes == [tuple(box) for box in random_boxes(bits, height, width, 0.08, 4 / 3).tolist()]


@pytest.mark.parametrize(("box", "scale"), [((10, 20, 100, 150), 1), ((31, 47, 130, 200), 2), ((3, 5, 280, 390), 4)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_only_the_scale_that_is_needed(
    library: str, box: tuple[int, int, int, int], scale: int, options: dict[str, Any]
) -> None:
    content = encode(noise(400, 300), **options)
    found = decode_region(content, lambda height, width: box, 64, decoder=library)
    assert np.array_equal(found, by_pillow(content, box, 64, scale))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_pictures(library: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(noise(120, 80), exif=exif)
    sizes = []

    def choose(height: int, width: int) -> tuple[int, int, int, int]:
        sizes.append((height, width))
        return 5, 7, 60, 61

    found = decode_region(content, choose, 32, decoder=library)
    assert sizes == [(120, 80) if orientation > 4 else (80, 120)]
    assert np.array_equal(found, by_pillow(content, (5, 7, 60, 61), 32))


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_colours_of_jpeg(library: str, mode: str) -> None:
    content = encode(noise(90, 70).convert(mode))
    found = decode_region(content, lambda height, width: (0, 0, 70, 70), 40, decoder=library)
    assert np.array_equal(found, by_pillow(content, (0, 0, 70, 70), 40))


@pytest.mark.parametrize(
    ("mode", "form"), [("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("I;16", "PNG"), ("P", "GIF"), ("F", "TIFF")]
)
def test_other_pictures_follow_the_rules_of_pillow(library: str, mode: str, form: str) -> None:
    values = np.random.default_rng(1).integers(0, 256, (70, 90))
    kind = {"I;16": np.uint16, "F": np.float32}.get(mode)
    image = (
        Image.fromarray((values / 255).astype(kind) if mode == "F" else (values * 200).astype(kind)) if kind else None
    )
    content = encode(image or noise(90, 70).convert(mode), form)
    found = decode_region(content, lambda height, width: (2, 3, 60, 60), 30, decoder=library)
    assert np.array_equal(found, by_pillow(content, (2, 3, 60, 60), 30))


@pytest.mark.parametrize(
    "damage", [lambda found: found[: len(found) // 2], lambda found: found[:30], lambda found: b""]
)
def test_damage_is_refused(library: str, damage: Callable[[bytes], bytes]) -> None:
    content = damage(encode(noise(200, 150)))
    for decode in (lambda: decode_square(content, 32, decoder=library), lambda: _crop(content, library)):
        with pytest.raises(DataError, match="cannot be read"):
            decode()


def _crop(content: bytes, library: str) -> np.ndarray:
    return decode_region(content, lambda height, width: (0, 0, 9, 9), 32, decoder=library)


def test_recoverable_damage_is_for_pillow_to_decide() -> None:
    """Bytes after the end of the picture, and before a marker, are warnings of libjpeg."""
    pytest.importorskip("simplejpeg")
    content = encode(noise(200, 150))
    for damaged in (content + b"rest", content[:-2] + b"\0\0\0" + content[-2:]):
        assert np.array_equal(_crop(damaged, TURBO), _crop(damaged, PILLOW))


def test_a_flipped_crop_is_its_mirror(library: str) -> None:
    content = encode(noise(90, 70))
    plain, flipped = (
        decode_region(content, lambda height, width: (2, 3, 60, 50), 40, decoder=library, is_flipped=is_flipped)
        for is_flipped in (False, True)
    )
    assert np.array_equal(flipped, plain[:, :, ::-1])


def test_crops_do_not_depend_on_the_threads_or_the_batch(tmp_path: Path, library: str) -> None:
    paths = []
    for number in range(12):
        paths.append(tmp_path / f"{number:02}.jpg")
        paths[-1].write_bytes(encode(noise(60 + 9 * number, 150 - 7 * number, seed=number)))
    ids, bits = torch.arange(12), draw_bits(torch.arange(12), 3)
    found = []
    for workers, parts in ((0, [ids]), (3, [ids]), (2, ids.split(5))):
        dataset = EncodedDataset(PictureFiles(tmp_path, paths), torch.zeros(12), 73, workers, library=library)
        crops = [Crops(bits[part], bits[part] > 0, 64, 0.08, 4 / 3, "bicubic") for part in parts]
        found.append(torch.cat([dataset.read_crops(part, crop) for part, crop in zip(parts, crops, strict=True)]))
        assert dataset.decoder == {PILLOW: 2, TURBO: "2 turbo"}[library]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len({crop.numpy().tobytes() for crop in found[0]}) == 12
