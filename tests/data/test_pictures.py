"""The same rules for every kind of picture, compared with Pillow's result."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from paceline.data import pictures
from paceline.data.pictures import ABSENT_EXTENSIONS, EXTENSIONS, look_at_picture, read_pixels
from paceline.errors import DataError

SIDE = 16


def noise(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def by_pillow(image: Image.Image) -> NDArray[np.uint8]:
    """The central square of an RGB picture, scaled."""
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    box = (left, top, left + short, top + short)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)


def grey(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return by_pillow(Image.fromarray(values).convert("RGB"))


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_pixels(path, SIDE)
    assert str(path) in caught.value.screen()
    return str(caught.value.got)


@pytest.mark.parametrize("extension", sorted(EXTENSIONS - {".pfm", ".pgm", ".pbm"}))
def test_every_format(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"p{extension}"
    form = {".jfif": "JPEG", ".jpe": "JPEG", ".mpo": "MPO"}.get(extension)
    Image.new("RGB", (50, 40), (250, 10, 10)).save(path, form)
    pixels = read_pixels(path, SIDE)
    assert pixels.shape == (3, SIDE, SIDE)
    assert pixels[0].min() > 230  # some formats are lossy
    assert pixels[1:].max() < 30


def test_every_extension_is_one_that_pillow_knows() -> None:
    Image.init()
    known = Image.registered_extensions()
    assert (EXTENSIONS | ABSENT_EXTENSIONS) - {".avif"} <= known.keys()
    assert {known[extension] for extension in EXTENSIONS} - {"MPO"} <= set(pictures.READ_FORMATS)


@pytest.mark.parametrize("form", ["EPS", "PDF", "ICO"])
def test_other_formats_are_refused_under_the_name_of_a_picture(tmp_path: Path, form: str) -> None:
    """Pillow would start another program for EPS."""
    path = tmp_path / "p.jpg"
    with path.open("wb") as file:
        noise().save(file, form)
    assert "cannot identify" in refused(path)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("extension", ["jpg", "png", "tif", "webp"])
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, extension: str) -> None:
    path = tmp_path / f"p.{extension}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    noise().save(path, exif=exif)
    with Image.open(path) as image:
        expected = by_pillow(ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(read_pixels(path, SIDE), expected)
    notes = look_at_picture(path).notes
    assert [note.startswith("turned") for note in notes] == [True] * (2 <= orientation <= 8)


def test_a_picture_with_exif_rotation_is_upright(tmp_path: Path) -> None:
    """Red above, blue below. The stored picture is rotated."""
    upright = Image.new("RGB", (32, 32), "red")
    upright.paste("blue", (0, 16, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer rotates it by 90 degrees clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "p.png", exif=exif)
    assert np.array_equal(read_pixels(tmp_path / "p.png", SIDE), by_pillow(upright))


def test_exif_that_cannot_be_read_is_no_rotation(tmp_path: Path) -> None:
    noise().save(tmp_path / "p.png", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert np.array_equal(read_pixels(tmp_path / "p.png", SIDE), by_pillow(noise()))


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr"])
def test_other_colours_are_converted_by_pillow(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "p.tif"
    noise().convert(mode).save(path)
    with Image.open(path) as image:
        assert np.array_equal(read_pixels(path, SIDE), by_pillow(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["RGBA", "LA", "palette", "colour"])
def test_transparent_parts_are_white(tmp_path: Path, kind: str) -> None:
    """For any colour in the file. Here it is black."""
    path = tmp_path / "p.png"
    black = Image.new("RGB", (SIDE, SIDE))
    if kind in ("RGBA", "LA"):
        image = black.convert(kind)
        image.putalpha(Image.new("L", image.size, 0))
        image.paste((90,) * (len(kind) - 1) + (255,), (0, 0, SIDE, SIDE // 2))
        image.save(path)
    elif kind == "palette":
        image = Image.new("P", (SIDE, SIDE), 0)
        image.putpalette([0, 0, 0, 90, 90, 90])
        image.paste(1, (0, 0, SIDE, SIDE // 2))
        image.save(path, transparency=b"\x00\xff")
    else:
        black.paste((90, 90, 90), (0, 0, SIDE, SIDE // 2))
        black.save(path, transparency=(0, 0, 0))
    pixels = read_pixels(path, SIDE)
    assert np.unique(pixels[:, : SIDE // 2]).tolist() == [90]
    assert np.unique(pixels[:, SIDE // 2 :]).tolist() == [255]


def test_half_transparent_is_half_white(tmp_path: Path) -> None:
    Image.new("RGBA", (9, 9), (0, 0, 0, 128)).save(tmp_path / "p.png")
    assert np.unique(read_pixels(tmp_path / "p.png", SIDE)).tolist() == [127]


@pytest.mark.parametrize("extension", ["png", "tif"])
def test_16_bits_are_their_high_byte(tmp_path: Path, extension: str) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (30, 40), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"p.{extension}")
    assert np.array_equal(read_pixels(tmp_path / f"p.{extension}", SIDE), grey((values >> 8).astype(np.uint8)))
    assert look_at_picture(tmp_path / f"p.{extension}").notes == []


def test_16_bit_colours_are_their_high_byte(tmp_path: Path) -> None:
    """Pillow reads them in this way. Grey pictures follow the same rule."""
    values = np.random.default_rng(1).integers(0, 65536, (SIDE, SIDE, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "p.png").write_bytes(png)
    assert np.array_equal(read_pixels(tmp_path / "p.png", SIDE), (values >> 8).astype(np.uint8).transpose(2, 0, 1))


@pytest.mark.parametrize("extension", ["png", "tif"])
def test_12_bits_in_16_are_not_black(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"p.{extension}"
    values = np.random.default_rng(1).integers(0, 4096, (30, 40), dtype=np.uint16)
    Image.fromarray(values).save(path)
    assert np.array_equal(read_pixels(path, SIDE), grey((values >> 4).astype(np.uint8)))
    assert "12 bits" in look_at_picture(path).notes[0]
    values[0, 0] = 4096  # one value that needs 13 bits
    Image.fromarray(values).save(path)
    assert np.array_equal(read_pixels(path, SIDE), grey((values >> 8).astype(np.uint8)))


def test_a_file_that_states_its_range_is_scaled_by_it(tmp_path: Path) -> None:
    """Dark values in a PGM file of 65535 levels are dark; 4095 of 4095 levels are white."""
    for most, value, expected in ((65535, 2560, 10), (4095, 4095, 255), (4095, 160, 10)):
        content = f"P5 9 9 {most}\n".encode() + value.to_bytes(2, "big") * 81
        (tmp_path / "p.pgm").write_bytes(content)
        assert np.unique(read_pixels(tmp_path / "p.pgm", SIDE)).tolist() == [expected]
        assert look_at_picture(tmp_path / "p.pgm").notes == []


def test_integers_of_32_bits_have_no_known_range(tmp_path: Path) -> None:
    path = tmp_path / "p.tif"
    values = np.random.default_rng(1).integers(0, 65536, (30, 40), dtype=np.int32)
    Image.fromarray(values).save(path)
    assert np.array_equal(read_pixels(path, SIDE), grey((values >> 8).astype(np.uint8)))
    for wrong in (-1, 65536):
        values[3, 4] = wrong
        Image.fromarray(values).save(path)
        assert str(wrong) in refused(path)


@pytest.mark.parametrize("extension", ["tif", "pfm"])
def test_floats_from_0_to_1(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"p.{extension}"
    values = np.random.default_rng(1).random((30, 40), dtype=np.float32)
    Image.fromarray(values).save(path)
    assert np.array_equal(read_pixels(path, SIDE), grey(np.rint(values * 255).astype(np.uint8)))
    for wrong in (-0.1, 1.5, 200.0, np.nan):
        values[3, 4] = wrong
        Image.fromarray(values).save(path)
        assert "0 (black) to 1 (white)" in refused(path)


@pytest.mark.parametrize("extension", ["gif", "webp", "png", "tif"])
def test_of_several_frames_the_first_is_read(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"p.{extension}"
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "lime", "blue")]
    options: dict[str, Any] = {"lossless": True} if extension == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    assert np.unique(read_pixels(path, SIDE).reshape(3, -1), axis=1).T.tolist() == [[255, 0, 0]]
    assert "first" in look_at_picture(path).notes[0]


@pytest.mark.parametrize("extension", sorted(EXTENSIONS - {".pfm", ".pgm", ".pbm", ".mpo", ".apng"}))
def test_truncated_pictures_are_refused(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"p{extension}"
    noise(200, 200).save(path, {".jfif": "JPEG", ".jpe": "JPEG"}.get(extension))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refused(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_huge_pictures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of file, hundreds of megabytes of pixels. Also if Pillow's limit was removed."""
    path = tmp_path / "p.png"
    Image.new("1", (20_000, 10_000)).save(path)
    assert "pixels" in refused(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert "20000 x 10000 pixels" in refused(path)


def test_an_open_picture_follows_the_same_rules() -> None:
    """For predictions in Python."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3
    noise().save(file, "PNG", exif=exif)
    with Image.open(file) as image:
        assert np.array_equal(pictures.square_pixels(image, SIDE), by_pillow(noise().rotate(180)))
    with pytest.raises(DataError):
        pictures.square_pixels(Image.new("F", (9, 9), 7.0), SIDE)
