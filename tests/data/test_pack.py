"""Packed pictures: the same pixels, the same bytes after an interruption, damage is detected, memory is limited."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness.picture_ranks import train_on_pictures
from harness.ranks import make_world, run_ranks
from paceline.data import ahead, pack_format
from paceline.data.ahead import ReadingWatch
from paceline.data.augment import build_pipeline
from paceline.data.check import check_packed, check_pictures
from paceline.data.dataset import LoadedData
from paceline.data.fingerprint import differences, fingerprint_of
from paceline.data.loader import Loader
from paceline.data.pack import PackRequest, pack
from paceline.data.pack_format import FINISHED, UNFINISHED, Packed, Shard, open_packed, shard_layout
from paceline.data.pictures import DECODER
from paceline.data.registry import check_data_config, describe_dataset, load_dataset
from paceline.data.sources import packed as packed_source
from paceline.errors import DataError, PacelineError, UserError
from paceline.runtime.detect import World
from paceline.settings.schema import DataConfig

IMAGE_SIZE, SIDE = 28, 32
SHARD_BYTES = 20 * 3 * SIDE * SIDE  # 20 pictures


class Silent:
    """A progress bar without output. It can raise after some pictures."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.total = self.done = 0
        self._stop_after = stop_after

    def start(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def advance(self, by: int) -> None:
        self.done += by
        if self._stop_after is not None and self.done > self._stop_after:
            raise KeyboardInterrupt


def make_pictures(root: Path, count: int = 45) -> Path:
    """Two classes of pictures of many sizes, shapes and formats, in one folder."""
    random = np.random.default_rng(7)
    for name in ("ant", "bee"):
        (root / name).mkdir(parents=True)
        for number in range(count):
            width, height = random.integers(20, 70, 2)
            image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
            extension = ("png", "jpg", "bmp")[number % 3]
            (image.convert("L") if number % 5 == 0 else image).save(root / name / f"{number:03}.{extension}")
    return root


def request(source: Path, target: Path, **changes: Any) -> PackRequest:
    wanted: dict[str, Any] = {"image_size": IMAGE_SIZE, "workers": 1, "shard_bytes": SHARD_BYTES, **changes}
    return PackRequest(source, target, **wanted)


def config(folder: Path, **changes: Any) -> DataConfig:
    wanted: dict[str, Any] = {"dataset": "folder", "data_dir": str(folder), "image_size": IMAGE_SIZE, **changes}
    return DataConfig(**wanted)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def packed(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed once. Tests that change it use a copy."""
    target = tmp_path_factory.mktemp("data") / "packed"
    progress = Silent()
    result = pack(request(pictures, target, workers=2), progress)
    assert (result.made, result.kept) == (5, 0)
    assert progress.done == progress.total == 90
    return target


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copied"))


def assert_equal(mine: LoadedData, theirs: LoadedData) -> None:
    assert mine.info == theirs.info
    assert mine.fingerprint() == theirs.fingerprint()
    for ours, other in ((mine.train, theirs.train), (mine.test, theirs.test)):
        assert torch.equal(ours.labels, other.labels)
        order = torch.randperm(len(other), generator=torch.Generator().manual_seed(3))
        assert torch.equal(ours.read(order), other.read(order))


def test_packed_pictures_have_the_pixels_of_the_folder(pictures: Path, packed: Path) -> None:
    mine, theirs = load_dataset(config(packed), 0), load_dataset(config(pictures), 0)
    assert_equal(mine, theirs)
    assert describe_dataset(config(packed), 0) == theirs.info
    assert len(open_packed(packed).shards_of("train")) > 2


def test_train_and_test_folders_keep_their_samples(tmp_path: Path) -> None:
    for half in ("train", "test"):
        make_pictures(tmp_path / "pictures" / half, count=3 if half == "train" else 2)
    pack(request(tmp_path / "pictures", tmp_path / "packed"), Silent())
    data = load_dataset(config(tmp_path / "packed"), 0)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert_equal(data, load_dataset(config(tmp_path / "pictures"), 0))


def test_a_validation_folder_is_packed(tmp_path: Path) -> None:
    for part, count in (("train", 12), ("Valid", 4), ("test", 2)):
        make_pictures(tmp_path / "pictures" / part, count)
    pack(request(tmp_path / "pictures", tmp_path / "packed"), Silent())
    data, theirs = load_dataset(config(tmp_path / "packed"), 0), load_dataset(config(tmp_path / "pictures"), 0)
    assert (data.info.num_train, data.info.num_validation, data.info.num_test) == (24, 8, 4)
    assert_equal(data, theirs)
    assert data.validation is not None
    assert theirs.validation is not None
    assert torch.equal(data.validation.read(torch.arange(8)), theirs.validation.read(torch.arange(8)))
    assert not differences(fingerprint_of(data), fingerprint_of(theirs))
    assert "24 train, 8 validation and 4 test" in check_packed(tmp_path / "packed", Silent()).what
    shutil.rmtree(tmp_path / "pictures" / "Valid")
    result = pack(request(tmp_path / "pictures", tmp_path / "packed"), Silent())
    assert (result.made, result.packed.parts) == (0, ["train", "test"])
    assert not list((tmp_path / "packed").glob("validation-*"))


def test_a_packing_of_format_1_is_used_for_training_and_replaced_by_pack(
    pictures: Path, packed: Path, copied: Path
) -> None:
    """The first decoder made its pixels: they are other data than the pictures or a new packing of them."""
    body = json.loads((copied / FINISHED).read_text())
    del body["decoder"], body["crc32"]
    body["paceline_packed"] = 1
    for shard in body["shards"]:
        shard["source"] = "of before"
    (copied / FINISHED).write_text(json.dumps({**body, "crc32": pack_format._seal(body)}))
    old = load_dataset(config(copied), 0)
    fingerprint = fingerprint_of(old)
    assert not differences(fingerprint, fingerprint_of(load_dataset(config(copied), 0)))
    assert differences(fingerprint, fingerprint_of(load_dataset(config(pictures), 0)))
    result = pack(request(pictures, copied), Silent())
    assert (result.made, result.packed.decoder) == (5, DECODER)
    assert files_of(copied) == files_of(packed)


def test_the_number_of_processes_and_a_second_packing_change_no_byte(
    pictures: Path, packed: Path, tmp_path: Path
) -> None:
    pack(request(pictures, tmp_path / "packed", workers=1), Silent())
    assert files_of(tmp_path / "packed") == files_of(packed)
    before = {path: path.stat().st_mtime_ns for path in packed.iterdir()}
    assert pack(request(pictures, packed), Silent()).made == 0
    assert {path: path.stat().st_mtime_ns for path in packed.iterdir()} == before


@pytest.mark.parametrize("stop_after", [0, 64])
def test_an_interrupted_packing_continues_to_the_same_bytes(
    pictures: Path, packed: Path, tmp_path: Path, stop_after: int
) -> None:
    target = tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        pack(request(pictures, target), Silent(stop_after))
    assert not (target / FINISHED).exists()
    with pytest.raises(DataError, match="never finished"):
        check_data_config(config(target))
    done = len(pack_format.read_description(target / UNFINISHED).shards)
    result = pack(request(pictures, target), Silent())
    assert result.kept == done
    assert (done > 0) == (stop_after > 0)
    assert files_of(target) == files_of(packed)
    assert list(target.glob(".*.part")) == []


def test_a_changed_picture_is_packed_again_and_the_others_are_not(pictures: Path, tmp_path: Path) -> None:
    source, target = Path(shutil.copytree(pictures, tmp_path / "pictures")), tmp_path / "packed"
    pack(request(source, target), Silent())
    written = {path.name: path.stat().st_mtime_ns for path in target.glob("*.u8")}
    Image.new("RGB", (40, 40), (1, 2, 3)).save(source / "ant" / "000.png")
    result = pack(request(source, target, shard_bytes=None), Silent())
    assert (result.made, result.kept) == (1, 4)
    changed = [path.name for path in target.glob("*.u8") if path.stat().st_mtime_ns != written[path.name]]
    assert len(changed) == 1
    (source / "bee" / "044.bmp").unlink()
    pack(request(source, target, shard_bytes=None), Silent())
    assert_equal(load_dataset(config(target), 0), load_dataset(config(source), 0))


def test_all_unreadable_pictures_are_named_and_grey_if_allowed(pictures: Path, tmp_path: Path) -> None:
    source, target = Path(shutil.copytree(pictures, tmp_path / "pictures")), tmp_path / "packed"
    broken = ["ant/004.jpg", "bee/010.jpg"]
    for name in broken:
        (source / name).write_bytes(b"not a picture")
    with pytest.raises(DataError) as failure:
        pack(request(source, target, unreadable=1), Silent())
    screen = failure.value.screen()
    assert "2 pictures cannot be read" in screen
    assert all(name in screen for name in [*broken, "--unreadable 2"])
    assert not (target / FINISHED).exists()
    result = pack(request(source, target, unreadable=2), Silent())
    assert (result.made, result.packed.unreadable) == (0, broken)  # earlier packed pictures count
    assert_equal(load_dataset(config(target), 0), load_dataset(config(source, unreadable=2), 0))
    unreadable = check_pictures(source, 2, Silent()).unreadable
    assert unreadable is not None
    assert all(name in unreadable.screen() for name in [*broken, "2 of 90 pictures"])


def flip_a_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(bytes(content))


def test_a_changed_bit_is_found_by_check_and_repaired_by_packing_again(
    pictures: Path, packed: Path, copied: Path
) -> None:
    assert "CRC-32 agree" in check_packed(copied, Silent()).proof
    flip_a_bit(copied / "train-00001.u8", 12345)
    with pytest.raises(DataError, match="damaged") as failure:
        check_packed(copied, Silent())
    assert "train-00001.u8: CRC-32" in failure.value.screen()
    assert "train-00000" not in failure.value.screen()
    (copied / "train-00001.u8").unlink()
    assert pack(request(pictures, copied), Silent()).made == 1
    assert files_of(copied) == files_of(packed)


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_a_damaged_shard_is_named_before_training_starts(copied: Path, damage: str) -> None:
    shard = copied / "test-00000.u8"
    if damage == "gone":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(DataError, match="damaged") as failure:
        check_data_config(config(copied))
    assert failure.value.exit_code == 3
    assert re.search(r"test-00000\.u8: (\S+ bytes instead of|no such file)", failure.value.screen())


def test_any_changed_bit_of_the_description_is_detected(copied: Path) -> None:
    description = copied / FINISHED
    whole = description.read_bytes()
    for place in range(0, len(whole), 41):
        flip_a_bit(description, place)
        with pytest.raises(PacelineError) as failure:
            open_packed(copied)
        assert failure.value.exit_code == 3
        description.write_bytes(whole)
    description.write_bytes(whole.replace(b'"paceline_packed": 2', b'"paceline_packed": 4'))
    with pytest.raises(DataError, match="another version"):
        open_packed(copied)


def test_a_description_with_a_path_outside_is_refused(copied: Path) -> None:
    found = open_packed(copied)
    foreign = Shard("../../etc/passwd", 20, "0" * 8, "")
    text = Packed(
        found.classes, found.per_class, found.side, found.pictures_per_shard, (foreign,), found.decoder
    ).to_text()
    (copied / FINISHED).write_text(text)
    with pytest.raises(DataError, match="damaged"):
        open_packed(copied)


def test_another_input_size_is_refused_unless_the_pipeline_shrinks(packed: Path, pictures: Path) -> None:
    with pytest.raises(UserError) as failure:
        check_data_config(config(packed, image_size=56))
    assert all(part in failure.value.screen() for part in ("32 x 32", "64 x 64", "--image-size 28"))
    with pytest.raises(UserError):
        check_data_config(config(packed, image_size=14, augment="light"))
    smaller = config(packed, image_size=14, augment="imagenet")
    info = describe_dataset(smaller, 0)
    assert build_pipeline(smaller, info, 0).input_shape == (3, 14, 14)
    with pytest.raises(UserError, match="another size"):
        pack(request(pictures, packed, image_size=56), Silent())


def test_two_packings_at_once_are_refused(pictures: Path, copied: Path) -> None:
    with (copied / ".pack.lock").open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            pack(request(pictures, copied), Silent())


def test_a_full_disk_with_fake_free_space_is_reported_before_the_first_write(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(UserError, match="not enough disk space"):
        pack(request(pictures, tmp_path / "packed"), Silent())
    assert files_of(tmp_path / "packed") == {}


def test_a_folder_that_cannot_be_written_is_named(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as failure:
        pack(PackRequest(pictures, tmp_path / "file" / "packed"), Silent())
    assert failure.value.where == str(tmp_path / "file" / "packed")
    assert failure.value.got == os.strerror(errno.ENOTDIR)


# --- Training from packed pictures


def batches_of(folder: Path, world: World) -> list[tuple[list[int], torch.Tensor]]:
    wanted = config(folder, augment="light")
    data = load_dataset(wanted, 5)
    loader = Loader(data.train, torch.arange(len(data.train)), build_pipeline(wanted, data.info, 5), world)
    batches = loader.train_epoch(seed=5, epoch=1, global_batch_size=16, first_step=1)
    return [(batch.ids.tolist(), batch.inputs) for batch in batches]


def test_two_ranks_read_the_samples_of_one(packed: Path) -> None:
    alone = batches_of(packed, make_world(0, 1))
    left, right = (batches_of(packed, make_world(rank, 2)) for rank in range(2))
    assert len(alone) == 3
    for (ids, inputs), (left_ids, left_inputs), (right_ids, right_inputs) in zip(alone, left, right, strict=True):
        assert ids == left_ids + right_ids
        assert torch.equal(inputs, torch.cat([left_inputs, right_inputs]))


def test_training_from_packed_pictures_gives_the_bits_of_training_from_the_folder_and_decodes_nothing(
    pictures: Path, packed: Path, tmp_path: Path
) -> None:
    from_folder = run_ranks(2, train_on_pictures, str(tmp_path / "a"), str(pictures), IMAGE_SIZE)
    from_packed = run_ranks(2, train_on_pictures, str(tmp_path / "b"), str(packed), IMAGE_SIZE)
    assert from_packed[0][0] == from_folder[0][0]
    assert "paceline.data.pictures" in from_folder[0][1]
    for _, modules in from_packed:  # all decoding is in that module
        assert "paceline.data.sources.packed" in modules
        assert "paceline.data.pictures" not in modules


def write_shards(folder: Path, count: int, per_shard: int) -> None:
    """Shards as packing creates them, without pictures."""
    folder.mkdir()
    shards = []
    for half, pictures in (("train", count), ("test", 2)):
        for name, size in shard_layout(half, pictures, per_shard):
            (folder / name).write_bytes(bytes(size * 3 * SIDE * SIDE))
            shards.append(Shard(name, size, "0" * 8, ""))
    per_class: dict[str, tuple[int, ...]] = {"train": (count - 1, 1), "test": (1, 1)}
    text = Packed(("a", "b"), per_class, SIDE, per_shard, tuple(shards), DECODER).to_text()
    (folder / FINISHED).write_text(text)


def memory_mb() -> tuple[float, float]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024, int(lines["RssFile"].split()[0]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell")
def test_memory_does_not_grow_with_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_source, "_MOST_MAPPED_BYTES", 16 * 2**20)
    write_shards(tmp_path / "packed", 48_000, 12_000)  # 147 MB in 4 shards
    train = load_dataset(config(tmp_path / "packed"), 0).train
    train.read(torch.arange(256))
    anonymous, mapped = memory_mb()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
    for ids in order.split(1000):
        train.read(ids)
        now_anonymous, now_mapped = memory_mb()
        # Space for a batch, and for other imports of the process.
        assert now_mapped < mapped + 32
        assert now_anonymous < anonymous + 32


# --- Slow reading


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)  # a run in this process may have replaced it
    return caplog


def look_at(dataset: Any, waits: list[float]) -> None:
    watch = ReadingWatch(dataset)
    for waited_s in waits:
        watch.look(waited_s, 1.0)


def test_a_slow_folder_gets_one_warning_with_a_remedy(
    pictures: Path, packed: Path, shown: pytest.LogCaptureFixture
) -> None:
    folder = load_dataset(config(pictures, num_workers=3), 0).train
    look_at(folder, [0.1] * 100 + [0.9] * 2 + [0.0] * 8)
    assert shown.messages == []
    look_at(folder, [0.4] * 50)
    (message,) = shown.messages
    assert "40 %" in message
    assert f"paceline data pack {pictures} {pictures}-packed" in message
    assert "--num-workers than 3" in message
    shown.clear()
    look_at(load_dataset(config(packed), 0).train, [0.4] * 50)
    (message,) = shown.messages
    assert "disk" in message


class _Failing:
    labels = torch.zeros(8, dtype=torch.int64)

    def __len__(self) -> int:
        return 8

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        if 5 in indices.tolist():
            raise DataError("sample 5 is broken")
        return torch.full((len(indices), 1, 2, 2), int(indices[0]), dtype=torch.uint8)


def test_an_error_while_reading_ahead_is_raised_at_its_batch() -> None:
    shares = list(torch.arange(8).split(2))
    coming = ahead.read_ahead(_Failing(), shares, "cpu", ReadingWatch(_Failing()))
    assert [int(next(coming)[1].max()) for _ in range(2)] == [0, 2]
    with pytest.raises(DataError, match="sample 5"):
        next(coming)
