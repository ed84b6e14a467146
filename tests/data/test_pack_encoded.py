"""Pictures packed as they are encoded: the weights of the folder, sizes without decoding, damage with a name."""

from __future__ import annotations

import io
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness.ranks import run_ranks
from harness.runs import train_in
from paceline.cli.data import Pack, pack_pictures
from paceline.data.check import check_packed
from paceline.data.encoded import EncodedDataset
from paceline.data.fingerprint import differences, fingerprint_of, sample_keys
from paceline.data.pack import PackRequest, pack
from paceline.data.pack_format import FINISHED, UNFINISHED, Encoding, Packed, Shard, open_packed, shard_layout
from paceline.data.packed_pictures import ENTRY, PackedPictures
from paceline.data.pictures import DECODER
from paceline.data.registry import check_data_config, load_dataset
from paceline.errors import DataError, UserError
from paceline.runtime.detect import World
from paceline.settings.schema import DataConfig

IMAGE_SIZE = 28


class Silent:
    def __init__(self, stop_after: int | None = None) -> None:
        self._left = stop_after

    def start(self, total: int, done: int) -> None: ...

    def advance(self, by: int) -> None:
        if self._left is not None:
            self._left -= by
            if self._left < 0:
                raise KeyboardInterrupt


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, val and test folders with pictures of several formats and shapes; one is turned by EXIF."""
    root, random = tmp_path_factory.mktemp("data") / "pictures", np.random.default_rng(7)
    exif = Image.Exif()
    exif[0x0112] = 6
    for half, count in (("train", 30), ("val", 8), ("test", 8)):
        for name in ("ant", "bee"):
            (root / half / name).mkdir(parents=True)
            for number in range(count):
                width, height = random.integers(30, 130, 2)
                small = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
                image = small.resize((int(width), int(height)))
                extension = ("jpg", "jpg", "png")[number % 3]
                options: dict[str, Any] = {"exif": exif} if number == 4 and extension == "jpg" else {}
                image.save(root / half / name / f"{number:03}.{extension}", **options)
    return root


def request(source: Path, target: Path, **changes: Any) -> PackRequest:
    return PackRequest(source, target, **{"encoding": Encoding(), "shard_bytes": 20_000, **changes})


@pytest.fixture(scope="module")
def packed(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("data") / "packed"
    assert pack(request(pictures, target), Silent()).made > 4
    return target


def config(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(**{"dataset": "folder", "data_dir": str(folder), "image_size": IMAGE_SIZE, **changes})


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def stored_in(folder: Path, part: str) -> PackedPictures:
    return PackedPictures(folder, open_packed(folder), part)


def test_the_bytes_names_and_identity_of_the_folder(pictures: Path, packed: Path) -> None:
    mine, theirs = load_dataset(config(packed), 0), load_dataset(config(pictures), 0)
    for (_, ours), (_, others) in zip(mine.parts(), theirs.parts(), strict=True):
        assert isinstance(ours, EncodedDataset)
        assert isinstance(others, EncodedDataset)
        assert [ours.pictures.read(n) for n in range(len(ours))] == [others.pictures.read(n) for n in range(len(ours))]
        assert list(ours.names()) == list(others.names())
        assert torch.equal(ours.labels, others.labels)
        assert torch.equal(sample_keys(ours), sample_keys(others))  # type: ignore[arg-type]
    assert mine.info == theirs.info
    assert fingerprint_of(mine) == fingerprint_of(theirs)  # a run goes on with either
    pixels = [Image.open(io.BytesIO(mine.train.pictures.read(n))).size for n in range(60)]  # type: ignore[attr-defined]
    sizes = stored_in(packed, "train").sizes().tolist()
    turned = [number for number, size in enumerate(sizes) if size != list(pixels[number])]
    assert [sizes[number] for number in turned] == [list(pixels[number][::-1]) for number in turned]
    assert len(turned) == 2
    assert "CRC-32 agree" in check_packed(packed, Silent()).proof


def train(world: World, folder: str, flags: tuple[str, ...], resume: bool = False) -> str:
    more = (f"--image-size={IMAGE_SIZE}", "--global-batch-size=16", "--epochs=2", "--augment=resized-crop")
    return str(train_in(world, folder, ("--dataset=folder", *more, *flags), resume=resume)["weights_sha256"])


CROPS = ("--crop-from=picture", "--exact", "--lanes=2")


@pytest.mark.long
@pytest.mark.parametrize("library", ["pillow", "turbo"])
def test_folder_and_packing_on_any_ranks_give_the_same_weights(
    pictures: Path, packed: Path, tmp_path: Path, library: str
) -> None:
    if library == "turbo":
        pytest.importorskip("simplejpeg")
    flags = (*CROPS, f"--decoder={library}")
    places = [(2, pictures), (1, packed)] if library == "turbo" else [(1, pictures), (2, packed)]
    found = set()
    for ranks, data in places:
        found |= set(run_ranks(ranks, train, str(tmp_path / f"{ranks}"), (*flags, f"--data-dir={data}")))
    assert len(found) == 1
    stopped = str(tmp_path / "stopped")
    run_ranks(1, train, stopped, (*flags, f"--data-dir={packed}", "--max-steps=4"))
    assert set(run_ranks(2, train, stopped, (*flags, f"--data-dir={pictures}"), True)) == found
    if library == "turbo":
        with pytest.raises(Exception, match="decoded by rules"):
            run_ranks(1, train, stopped, (*CROPS, f"--data-dir={packed}", "--epochs=3"), True)
    else:
        with pytest.raises(Exception, match="crop_from"):
            run_ranks(1, train, stopped, (*CROPS[1:], f"--data-dir={packed}", "--epochs=3"), True)


def test_a_stopped_packing_continues_to_the_same_bytes(pictures: Path, packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        pack(request(pictures, target), Silent(stop_after=40))
    assert (target / UNFINISHED).exists()
    with pytest.raises(DataError, match="never finished"):
        check_data_config(config(target))
    result = pack(request(pictures, target), Silent())
    assert result.made > 0
    assert result.kept > 0
    assert files_of(target) == files_of(packed)
    again = pack(request(pictures, target), Silent())
    assert again.made == 0
    with pytest.raises(UserError, match="another way"):
        pack(request(pictures, target, encoding=None, image_size=32), Silent())


def test_larger_pictures_are_encoded_again(pictures: Path, tmp_path: Path) -> None:
    pack(request(pictures, tmp_path / "packed", encoding=Encoding(64, 80)), Silent())
    small, whole = stored_in(tmp_path / "packed", "train"), load_dataset(config(pictures), 0)
    changed = 0
    for number, size in enumerate(small.sizes().tolist()):
        content = whole.train.pictures.read(number)  # type: ignore[attr-defined]
        assert max(size) <= 64
        if small.read(number) != content:
            changed += 1
            image = Image.open(io.BytesIO(small.read(number)))
            assert image.format == "JPEG"
            assert list(image.size) == size
    assert 30 < changed < 60
    found = differences(fingerprint_of(load_dataset(config(tmp_path / "packed"), 0)), fingerprint_of(whole))
    assert "other names or sizes" in found[0]  # these are other pixels


def test_unreadable_pictures_are_grey(pictures: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    (source / "train" / "ant" / "001.jpg").write_bytes((source / "train" / "ant" / "001.jpg").read_bytes()[:300])
    with pytest.raises(DataError, match="1 picture cannot be read"):
        pack(request(source, tmp_path / "packed"), Silent())
    pack(request(source, tmp_path / "packed", unreadable=1), Silent())
    data = load_dataset(config(tmp_path / "packed"), 0)
    assert data.train.read(torch.tensor([1])).unique().tolist() == [128]


def test_damage_is_named(packed: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(packed, tmp_path / "copied"))
    shard = open_packed(copied).shards_of("train")[1]
    path = copied / shard.file
    content = bytearray(path.read_bytes())
    index = np.frombuffer(content, ENTRY, shard.pictures, shard.pictures_bytes)
    index["bytes"][0] = 2**31  # an index that points outside of its pictures
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="damaged") as failure:
        check_packed(copied, Silent())
    assert f"{shard.file}: CRC-32" in failure.value.screen()
    with pytest.raises(DataError, match=f"shard {shard.file} is damaged"):
        stored_in(copied, "train").read(open_packed(copied).pictures_per_shard)
    os.truncate(path, 100)
    with pytest.raises(DataError, match=f"shard {shard.file} is damaged"):
        check_data_config(config(copied))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"image_size": 64, "format": "encoded"}, "--image-size"),
        ({"max_side": 64}, "--max-side"),
        ({"quality": 64, "format": "encoded"}, "--quality"),
    ],
)
def test_a_flag_without_effect_is_refused(tmp_path: Path, flags: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        pack_pictures(replace(Pack(str(tmp_path), str(tmp_path / "new")), **flags))


def test_pixels_have_no_whole_pictures(pictures: Path, tmp_path: Path) -> None:
    pack(request(pictures, tmp_path / "packed", encoding=None, image_size=IMAGE_SIZE), Silent())
    wanted = config(tmp_path / "packed", augment="resized-crop", crop_from="picture")
    with pytest.raises(UserError, match="no whole pictures"):
        check_data_config(wanted)
    with pytest.raises(UserError, match="no whole pictures"):
        check_data_config(replace(wanted, dataset="shapes"))


def test_a_million_pictures_open_in_a_second(tmp_path: Path) -> None:
    """The limit is ten times what it takes."""
    total, per_shard = 1_000_000, 4_000
    shards = []
    one = io.BytesIO()
    Image.new("RGB", (8, 8)).save(one, "JPEG")
    for name, count in [*shard_layout("train", total, per_shard, "enc"), *shard_layout("test", 1, per_shard, "enc")]:
        index = np.zeros(count, ENTRY)
        index["bytes"], index["name_end"] = len(one.getvalue()), 1
        (tmp_path / name).write_bytes(one.getvalue() + index.tobytes() + b"x")
        shards.append(Shard(name, count, "0" * 8, "", (), len(one.getvalue()), 1))
    described = Packed(
        ("a", "b"), {"train": (total // 2,) * 2, "test": (1, 0)}, 0, per_shard, tuple(shards), DECODER, Encoding(),
        {"train": "0", "test": "0"},
    )  # fmt: skip
    (tmp_path / FINISHED).write_text(described.to_text())
    began = time.process_time()
    data = load_dataset(config(tmp_path), 0)
    assert time.process_time() - began < 1.0
    assert len(data.train) == total
    assert data.train.read(torch.tensor([total - 1])).shape == (1, 3, 32, 32)
