"""Tar, WebDataset and zip files: the samples of a folder, indexes that follow the data, hostile and damaged files."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.archive_files import as_tree, make_pictures, write_tar, write_webdataset, write_zip
from paceline.cli.main import main
from paceline.data.archives import opened
from paceline.data.archives.arrange import part_word
from paceline.data.dataset import LoadedData
from paceline.data.fingerprint import differences, fingerprint_of, sample_keys
from paceline.data.registry import describe_dataset, load_dataset
from paceline.errors import DataError, UserError
from paceline.settings.schema import DataConfig

PARTS = {"train": 5, "val": 2, "test": 3}


def config(data_dir: Path) -> DataConfig:
    return DataConfig(dataset="folder", data_dir=str(data_dir), image_size=28, num_workers=0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "indexes"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures") / "set", PARTS)


def require_same(found: LoadedData, wanted: LoadedData) -> None:
    """Samples, labels, names and fingerprint."""
    assert found.info == wanted.info
    assert not differences(fingerprint_of(wanted), fingerprint_of(found))
    assert fingerprint_of(wanted) == fingerprint_of(found)
    for (_, one), (_, other) in zip(found.parts(), wanted.parts(), strict=True):
        keys, others = sample_keys(one), sample_keys(other)
        assert keys is not None
        assert others is not None
        assert torch.equal(keys, others)
        every = torch.arange(len(one))
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.read(every), other.read(every))


def tar_tree(root: Path, to: Path) -> Path:
    return write_tar(to / "all.tar", as_tree(root, top="./set/"))


def tar_per_part(root: Path, to: Path) -> Path:
    for part in PARTS:
        write_tar(to / part / "part.tar", as_tree(root / part))
    return to


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "tar": tar_tree,
    "a tar file per part": tar_per_part,
    "WebDataset with numbers": write_webdataset,
    "WebDataset with JSON": lambda root, to: write_webdataset(root, to, label="json"),
    "zip": lambda root, to: write_zip(root, to / "all.zip"),
    "deflated zip": lambda root, to: write_zip(root, to / "all.zip", zipfile.ZIP_DEFLATED, top="set/"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_archives_hold_the_samples_of_the_folder(kind: str, pictures: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    archives = WRITERS[kind](pictures, to)
    wanted = load_dataset(config(pictures), 0)
    require_same(load_dataset(config(archives), 0), wanted)
    require_same(load_dataset(config(to), 0), wanted)  # the folder of the archives
    assert describe_dataset(config(to), 0) == wanted.info


def test_without_parts_the_same_pictures_are_held_for_the_test(tmp_path: Path) -> None:
    root = make_pictures(tmp_path / "set", {"": 12})
    archive = write_zip(root, tmp_path / "set.zip")
    require_same(load_dataset(config(archive), 0), load_dataset(config(root), 0))


def test_validation_is_the_test_without_one(pictures: Path, tmp_path: Path) -> None:
    write_webdataset(pictures, tmp_path / "to")
    for path in (tmp_path / "to").glob("test-*"):
        path.unlink()
    data = load_dataset(config(tmp_path / "to"), 0)
    assert data.validation is None
    assert len(data.test) == 4
    assert dict(data.info.folders)["test"] == "val-000000.tar and 1 more"


def test_numbers_with_leading_zeros_are_numbers(tmp_path: Path) -> None:
    for part in ("train", "test"):
        labels = {"1": b"010", "2": b"002", "3": b"2"}
        members = [(f"{key}.jpg", b"x") for key in labels] + [(f"{key}.cls", label) for key, label in labels.items()]
        write_tar(tmp_path / f"{part}.tar", members)
    data = load_dataset(config(tmp_path), 0)
    assert data.info.classes == ("2", "10")
    assert list(data.train.names()) == [b"train/2/2.jpg", b"train/2/3.jpg", b"train/10/1.jpg"]  # type: ignore[attr-defined]
    (tmp_path / "classes.txt").write_text("".join(f"class {number}\n" for number in range(11)))
    assert load_dataset(config(tmp_path), 0).train.labels.tolist() == [2, 2, 10]


# --- Indexes


def test_an_index_is_made_once_and_again_for_other_data(
    pictures: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    whole = opened.index_file

    def counted(place: Any, file: Any, advance: Any) -> Any:
        made.append(file.name)
        return whole(place, file, advance)

    monkeypatch.setattr(opened, "index_file", counted)
    to = write_webdataset(pictures, tmp_path / "to")
    first = load_dataset(config(to), 0)
    assert len(made) == 6
    load_dataset(config(to), 0)
    assert len(made) == 6
    # A damaged catalog is made from the indexes; a damaged index is made again; both without an error.
    for path in [*cache.glob("*.catalog"), sorted(cache.glob("*.entries"))[0]]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    require_same(load_dataset(config(to), 0), first)
    assert len(made) == 7
    # Another archive under the same name: only that one is indexed.
    extra = as_tree(pictures / "train" / "ant")[0][1]
    write_tar(to / "train-000000.tar", [("bird/new.jpg", extra), ("bird/new.cls", b"1"), ("ant/a.jpg", extra)])
    with pytest.raises(DataError, match="a picture has no label"):
        load_dataset(config(to), 0)
    write_tar(to / "train-000000.tar", [("bird/new.jpg", extra), ("bird/new.cls", b"1")])
    assert len(load_dataset(config(to), 0).train) == 6
    assert made[7:] == ["train-000000.tar", "train-000000.tar"]
    assert len(list(cache.glob("*.catalog"))) == 1


def test_an_index_of_other_data_is_not_used(pictures: Path, tmp_path: Path, cache: Path) -> None:
    """Another user has given it the name of this data's index."""
    one = write_zip(pictures, tmp_path / "one.zip")
    wanted = load_dataset(config(one), 0)
    (mine,) = cache.glob("*.catalog")
    mine.rename(tmp_path / "kept")
    other = write_zip(make_pictures(tmp_path / "other", {"train": 2, "test": 1}), tmp_path / "other.zip")
    load_dataset(config(other), 0)
    (strange,) = cache.glob("*.catalog")
    strange.rename(mine)
    require_same(load_dataset(config(one), 0), wanted)


def test_interrupted_indexing_continues(
    pictures: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, whole, made = write_webdataset(pictures, tmp_path / "to"), opened.index_file, []

    def interrupted(place: Any, file: Any, advance: Any) -> Any:
        made.append(file.name)
        if len(made) == 4:
            raise KeyboardInterrupt
        return whole(place, file, advance)

    monkeypatch.setattr(opened, "index_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_dataset(config(to), 0)
    require_same(load_dataset(config(to), 0), load_dataset(config(pictures), 0))
    assert len(made) == 7


def test_a_cache_that_cannot_be_written_is_no_error(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    archive = write_zip(pictures, tmp_path / "all.zip")
    require_same(load_dataset(config(archive), 0), load_dataset(config(pictures), 0))


# --- Damaged and hostile archives


def special(kind: bytes, name: str = "train/ant/x.jpg") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = "/etc/passwd"
            tar.addfile(member)

    return write


def named(name: str) -> Callable[[Path], object]:
    return lambda path: write_tar(path, [(name, b"x")])


def truncated(keep: float) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_tar(path, [(f"train/ant/{number}.jpg", b"x" * 3000) for number in range(9)])
        path.write_bytes(path.read_bytes()[: int(keep * 9 * 3584)])

    return write


def damaged_header(path: Path) -> None:
    write_tar(path, [(f"train/ant/{number}.jpg", b"x" * 3000) for number in range(9)])
    content = bytearray(path.read_bytes())
    content[3584 * 4 + 3] ^= 1
    path.write_bytes(bytes(content))


def huge_header(kind: bytes) -> Callable[[Path], None]:
    """It states more bytes than the memory of any machine has."""

    def write(path: Path) -> None:
        header = tarfile.TarInfo("train/ant/1.jpg")
        header.type, header.size = kind, 2**60
        path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))

    return write


def negative_size(name: str) -> Callable[[Path], None]:
    """A size that leads back into the file. Python before 3.13.6 accepts it."""

    def write(path: Path) -> None:
        header = tarfile.TarInfo(name)
        header.size = -1024
        path.write_bytes(
            write_tar(path, [("train/ant/1.jpg", b"x")]).read_bytes()[:1024] + header.tobuf() + bytes(1024)
        )

    return write


def two_archives(path: Path) -> None:
    """As `cat` joins them."""
    path.write_bytes(b"".join(write_tar(path, [(f"train/{name}/1.jpg", b"x")]).read_bytes() for name in ("ant", "bee")))


TARS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a symbolic link": (special(tarfile.SYMTYPE), "a link"),
    "a hard link": (special(tarfile.LNKTYPE), "a link"),
    "a device": (special(tarfile.CHRTYPE), "a device"),
    "an absolute name": (named("/etc/x.jpg"), "/etc/x.jpg"),
    "a name above": (named("train/../../x.jpg"), "train/../../x.jpg"),
    "truncated in a picture": (truncated(0.47), "truncated"),
    "truncated between pictures": (truncated(4 / 9), "truncated"),
    "a damaged header": (damaged_header, "no header at byte 14,336"),
    "huge pax records": (huge_header(tarfile.XHDTYPE), "a header of 1,152,921,504,606,846,976 bytes"),
    "a huge long name": (huge_header(tarfile.GNUTYPE_LONGNAME), "a header of 1,152,921,504,606,846,976 bytes"),
    "a negative size": (negative_size("train/ant/2.jpg"), "-1,024 bytes for train/ant/2.jpg"),
    "a label of a negative size": (negative_size("train/ant/1.cls"), "-1,024 bytes for train/ant/1.cls"),
    "two archives in a file": (two_archives, "behind its end at byte 1,024"),
    "no tar file": (lambda path: path.write_bytes(b"x" * 5000), "all.tar"),
    "empty": (lambda path: path.write_bytes(b""), "all.tar"),
    "compressed": (lambda path: path.write_bytes(b"\x1f\x8b" + bytes(2000)), "gzip"),
    "a name twice": (lambda path: write_tar(path, [("train/ant/1.jpg", b"x")] * 2), "train/ant/1.jpg"),
    "no pictures": (lambda path: write_tar(path, [("train/ant/1.txt", b"x")]), "all.tar"),
    "one class": (lambda path: write_tar(path, [("train/ant/1.jpg", b"x"), ("test/ant/1.jpg", b"x")]), "ant"),
    "no class folder": (lambda path: write_tar(path, [("1.jpg", b"x")]), "1.jpg"),
    "no label": (lambda path: write_tar(path, [("1.jpg", b"x"), ("2.jpg", b"x"), ("2.cls", b"0")]), "1.jpg"),
    "a label without a class": (lambda path: write_tar(path, [("1.jpg", b"x"), ("1.cls", b" ")]), "''"),
    "a label -1": (lambda path: write_tar(path, [("1.jpg", b"x"), ("1.cls", b"-1")]), "'-1'"),
    "a label in bad JSON": (lambda path: write_tar(path, [("1.jpg", b"x"), ("1.json", b'{"label": ')]), "1.json"),
    "a label that is a list": (lambda path: write_tar(path, [("1.jpg", b"x"), ("1.json", b'{"cls": [1]}')]), "[1]"),
}


@pytest.mark.parametrize("fault", TARS)
def test_bad_tar_files_are_named(
    fault: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, names = TARS[fault]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "all.tar")
    assert main(["plan", "folder-resnet50", "--data-dir", "data"]) == 3
    shown = capsys.readouterr().err
    assert names in shown
    assert "all.tar" in shown or "data" in shown
    assert "Traceback" not in shown
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "cache"}  # nothing is unpacked
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"all.tar"}


def bomb() -> bytes:
    """A picture whose directory states gigabytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/ant/1.jpg", bytes(10**6))
        archive.infolist()[0].file_size = 2**32 - 2
    return content.getvalue()


def overlapping() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for number in range(2):
            archive.writestr(f"train/ant/{number}.jpg", b"x" * 100)
        archive.infolist()[1].header_offset = 0
    return content.getvalue()


def odd_member(**about: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("train/ant/1.jpg", b"x")
        for name, value in about.items():
            setattr(archive.infolist()[0], name, value)
    return content.getvalue()


ZIPS = {
    "a bomb": (bomb(), "4,294,967,294 bytes"),
    "overlapping members": (overlapping(), "verlap"),  # of ours, or of Python's own check
    "a link": (odd_member(external_attr=0o120777 << 16), "a link"),
    "encrypted": (odd_member(flag_bits=1), "encrypted"),
    "another method": (odd_member(compress_type=12), "method 12"),
    "no zip file": (b"x" * 1000, "all.zip"),
    "truncated": (odd_member()[:-10], "all.zip"),
}


@pytest.mark.parametrize("fault", ZIPS)
def test_bad_zip_files_are_named(fault: str, tmp_path: Path) -> None:
    content, names = ZIPS[fault]
    (tmp_path / "all.zip").write_bytes(content)
    with pytest.raises(DataError) as failure:
        load_dataset(config(tmp_path / "all.zip"), 0)
    assert names in failure.value.screen()
    assert str(failure.value.where).partition(":")[0] == str(tmp_path / "all.zip")


def test_a_picture_that_expands_beyond_its_size_is_refused(pictures: Path, tmp_path: Path) -> None:
    """The directory states one size, the stream has another one."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in as_tree(pictures):
            archive.writestr(name, content)
        liar = archive.getinfo("train/ant/1.jpg")
        liar.file_size -= 1
    data = load_dataset(config(tmp_path / "all.zip"), 0)
    with pytest.raises(DataError) as failure:
        data.train.read(torch.arange(len(data.train)))
    assert "train/ant/1.jpg" in failure.value.screen()
    assert "CRC-32" in failure.value.screen()


def test_an_archive_that_becomes_shorter_is_named(pictures: Path, tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "all.tar", as_tree(pictures))
    data = load_dataset(config(archive), 0)
    data.train.read(torch.arange(1))  # the archive is open from now on
    with archive.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(DataError) as failure:
        data.train.read(torch.arange(len(data.train)))
    assert str(failure.value.where).startswith(f"{archive}: train/ant/")
    assert "shorter" in failure.value.screen()


def test_an_archive_that_is_replaced_before_its_first_picture_is_named(pictures: Path, tmp_path: Path) -> None:
    """The same sizes in another order: every place of the index holds a picture, but of another class."""
    tree = [(name, content.ljust(3000, b"\0")) for name, content in as_tree(pictures)]
    archive = write_tar(tmp_path / "all.tar", tree)
    data = load_dataset(replace(config(archive), unreadable=5), 0)
    write_tar(tmp_path / "new.tar", tree[::-1]).replace(archive)
    with pytest.raises(DataError) as failure:
        data.train.read(torch.arange(len(data.train)))
    assert "has changed" in failure.value.screen()
    assert "all.tar" in failure.value.screen()


def test_data_check_names_damaged_pictures_of_archives(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_webdataset(pictures, tmp_path / "to")
    assert main(["data", "check", str(tmp_path / "to")]) == 0
    assert "10 train, 4 validation and 6 test pictures of 2 classes" in capsys.readouterr().out
    write_tar(tmp_path / "to" / "test-000009.tar", [("x.jpg", b"x"), ("x.cls", b"0"), ("x.txt", b"")])
    assert main(["data", "check", str(tmp_path / "to")]) == 3
    shown = capsys.readouterr()
    assert "test/ant/x.jpg" in shown.err
    assert "test-000009.tar: x.txt" in shown.out
    assert main(["data", "pack", str(tmp_path / "to"), str(tmp_path / "packed")]) == 2


def test_the_part_is_a_word_of_the_name(pictures: Path, tmp_path: Path) -> None:
    """As in ImageNet of timm on Hugging Face: imagenet1k-train-0000.tar."""
    to = write_webdataset(pictures, tmp_path / "to")
    for path in [*to.glob("*.tar")]:
        path.rename(path.with_name(f"pets1k_{path.name}"))
    require_same(load_dataset(config(to), 0), load_dataset(config(pictures), 0))
    names = {"pets-train.tar": "train", "train-val.tar": "train", "test/1.tar": "test", "pets-train-test.tar": ""}
    assert {name: part_word(name) for name in names} == names


def test_archives_that_do_not_fit_together(pictures: Path, tmp_path: Path) -> None:
    def refused(part: str) -> None:
        with pytest.raises(DataError) as failure:
            load_dataset(config(tmp_path / "to"), 0)
        assert part in failure.value.screen()

    to = write_webdataset(pictures, tmp_path / "to")
    copy = (to / "train-000000.tar").read_bytes()
    (to / "train-000009.tar").write_bytes(copy)
    refused("in train-000000.tar and in train-000009.tar")
    (to / "train-000009.tar").unlink()
    write_tar(to / "test-000009.tar", [("x.jpg", b"x"), ("x.cls", b"7")])
    refused("x.jpg: 7")
    write_tar(to / "test-000009.tar", [("train/ant/x.jpg", b"x")])
    refused("test-000009.tar has none")
    (to / "test-000009.tar").unlink()
    (to / "more.zip").write_bytes(b"")
    refused("tar, zip")
    (to / "more.zip").rename(to / "more.tar")
    write_tar(to / "more.tar", [("x.jpg", b"x"), ("x.cls", b"0")])
    refused("more.tar")


def test_archives_beside_class_folders_are_not_used(pictures: Path, tmp_path: Path) -> None:
    """Often the download lies beside what was unpacked from it."""
    root = make_pictures(tmp_path / "set", PARTS)
    write_zip(root / "train", root / "train.zip")
    require_same(load_dataset(config(root), 0), load_dataset(config(pictures), 0))


def test_a_compressed_tar_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "all.tar.gz").touch()
    with pytest.raises(UserError, match="compressed"):
        load_dataset(config(tmp_path / "all.tar.gz"), 0)
