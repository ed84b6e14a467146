"""`paceline data`: a killed packing continues, mistakes give one screen, damage is named."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.cli import Answer, assert_refused, paceline
from harness.processes import seconds_until_empty, started

PACK = ("data", "pack", "pictures", "packed", "--image-size=56", "--shard-mb=1", "--workers=2")
USER, DATA = 2, 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 600 pictures of 64 x 64 pixels, 85 to a shard of 1 MB."""
    home = tmp_path_factory.mktemp("home")
    random = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (home / "pictures" / name).mkdir(parents=True)
        for number in range(300):
            pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / "pictures" / name / f"{number:03}.png")
    return home


@pytest.fixture(scope="module")
def whole(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed without an interruption."""
    cwd = tmp_path_factory.mktemp("whole")
    (cwd / "pictures").symlink_to(home / "pictures")
    answer = paceline(*PACK, cwd=cwd)
    assert answer.code == 0, answer
    assert "600 pictures of 2 classes, 64 x 64 pixels, 7.4 MB in 8 shards" in answer.out
    assert "paceline train RECIPE --dataset folder --data-dir packed --image-size 56" in answer.out
    return cwd / "packed"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def test_a_killed_packing_leaves_no_process_and_continues_to_the_same_bytes(
    home: Path, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "pictures").symlink_to(home / "pictures")
    with started(*PACK, cwd=tmp_path) as packing:
        packing.wait_for("packed ")
        # When the second shard exists, the first is listed, and others are not made yet.
        while len(list((tmp_path / "packed").glob("*.u8"))) < 2:
            assert packing.process.poll() is None
        os.kill(packing.process.pid, signal.SIGKILL)
        packing.wait()
        seconds_until_empty(tmp_path, limit_s=20)
    assert not (tmp_path / "packed" / "packed.json").exists()
    answer = paceline(*PACK, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "continuing: " in answer.out
    assert contents(tmp_path / "packed") == contents(whole)
    assert list((tmp_path / "packed").glob(".*.part")) == []


def test_check_names_the_damaged_shard_and_training_does_not_start_on_a_short_one(whole: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    for name, content in contents(whole).items():
        (packed / name).write_bytes(content)
    answer = paceline("data", "check", "packed", cwd=tmp_path)
    assert answer.code == 0, answer
    assert "8 shards, sizes and CRC-32 agree" in answer.out
    shard = packed / "train-00002.u8"
    shard.write_bytes(shard.read_bytes()[:-5] + b"x" * 5)
    assert_refused(paceline("data", "check", "packed", cwd=tmp_path), DATA, "train-00002.u8: CRC-32")
    os.truncate(shard, 100)
    train = ("train", "shapes-cnn", "--dataset=folder", "--data-dir=packed", "--image-size=56")
    assert_refused(paceline(*train, cwd=tmp_path), DATA, "train-00002.u8: 100 bytes instead of 1,044,480")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["pakc", "pictures", "packed"], ["paceline data pack pictures packed"]),
        (["pack", "pictures"], ["paceline data pack PICTURES PACKED"]),
        (["pack", "nowhere", "packed"], ["no such folder", "nowhere"]),
        (["pack", "pictures", "pictures/packed"], ["one inside the other", "pictures-packed"]),
        (["pack", "pictures", "other"], ["holds something else", "other"]),
        (["pack", "pictures", "packed", "--imagesize=3"], ["unknown flag", "--image-size"]),
        (["pack", "pictures", "packed", "--image-size=x"], ["--image-size", "8 up to 2048"]),
        (["pack", "pictures", "packed", "--workers"], ["--workers needs a value"]),
        (["check", "nowhere"], ["nowhere", "fashion-mnist"]),
        (["check"], ["is missing", "paceline data check"]),
        (["fetch", "imagenet"], ["imagenet", "cifar10, cifar100, fashion-mnist"]),
    ],
    ids=lambda value: (
        " ".join(value) if isinstance(value, list) and value[0] in ("pakc", "pack", "check", "fetch") else ""
    ),
)
def test_mistakes(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    parts: list[str],
) -> None:
    from paceline.cli.main import main

    (tmp_path / "pictures").symlink_to(home / "pictures")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    code = main(["data", *arguments])
    said = capsys.readouterr()
    assert_refused(Answer(code, said.out, said.err), USER, *parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "pictures"]


def small_set(root: Path) -> Path:
    """Three splits of two classes. Every picture differs."""
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 2), ("test", 2)):
        for name in ("ant", "bee"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (9, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def check(folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, list[str]], str]:
    """The lines of `data check` by their first word, and the error screen."""
    from paceline.cli.main import main

    assert main(["data", "check", str(folder), "--workers=1"]) == code
    said = capsys.readouterr()
    lines: dict[str, list[str]] = {}
    for line in said.out.splitlines():
        lines.setdefault(line.split()[0].rstrip(":"), []).append(line)
    return lines, said.err


def test_check_names_the_splits_and_lists_skipped_and_suspicious_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_set(tmp_path / "pictures")
    lines, _ = check(folder, capsys)
    assert set(lines) == {"checked", "train", "validation", "test", "whole"}
    assert [lines[part][0].split()[1] for part in ("train", "validation", "test")] == ["train/:", "val/:", "test/:"]
    (folder / "__MACOSX").mkdir()
    for number in range(5):
        (folder / "train" / "ant" / f"{number}.heic").write_bytes(b"x")
    shutil.copy(folder / "train" / "ant" / "0.png", folder / "test" / "ant" / "leaked.png")
    shutil.copy(folder / "train" / "ant" / "1.png", folder / "train" / "bee" / "wrong.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(folder / "train" / "bee" / "turned.jpg", exif=exif)
    Image.fromarray(np.full((9, 9), 4000, dtype=np.uint16)).save(folder / "train" / "bee" / "deep.png")
    lines, _ = check(folder, capsys)
    heic, hidden = lines["skipped"]
    assert "5 (.heic" in heic
    assert "0.heic, train/ant/1.heic, train/ant/2.heic and 2 more" in heic
    assert "__MACOSX" in hidden
    assert ["turned.jpg" in line for line in lines["note"]] == [True]
    deep, classes, parts = lines["suspicious"]
    assert "deep.png" in deep
    assert "train/ant/1.png, train/bee/wrong.png" in classes
    assert "train/ant/0.png, test/ant/leaked.png" in parts


def test_check_of_a_folder_with_an_unreadable_picture_ends_with_exit_code_3_after_the_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_set(tmp_path / "pictures")
    (folder / "val" / "bee" / "0.png").write_bytes(b"no picture")
    (folder / "val" / "notes.txt").write_bytes(b"x")
    lines, screen = check(folder, capsys, DATA)
    assert "whole" not in lines
    assert len(lines["skipped"]) == 1
    assert "val/bee/0.png" in screen


@pytest.mark.parametrize("kind", ["folder", "packed", "function"])
def test_a_split_of_data_with_a_validation_set_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The split in a recipe is for other data and is not used."""
    from paceline.cli.main import main

    folder, flags = small_set(tmp_path / "pictures"), ["shapes-cnn", "--dataset=folder", "--image-size=8"]
    if kind == "packed":
        assert main(["data", "pack", str(folder), str(tmp_path / "packed"), "--image-size=8", "--workers=1"]) == 0
        folder = tmp_path / "packed"
    flags += [f"--data-dir={folder}", "--global-batch-size=4", "--processes=1"]
    if kind == "function":
        (tmp_path / "mine.py").write_text(
            "import numpy as np\n\ndef load():\n"
            "    part = np.zeros((8, 3, 8, 8), dtype=np.uint8), np.arange(8) % 2\n"
            "    return {'train': part, 'val': part, 'test': part}\n"
        )
        flags.append(f"--dataset={tmp_path / 'mine.py'}:load")
    capsys.readouterr()
    assert main(["plan", *flags]) == 0
    assert "validation" in capsys.readouterr().out
    assert main(["plan", *flags, "--train-split=0.8"]) == USER
    assert "flag --train-split" in capsys.readouterr().err
    answer = paceline("train", *flags, "--train-split=0.8", "--epochs=1", cwd=tmp_path)
    assert_refused(answer, USER, "flag --train-split")


def test_check_looks_for_named_sets_but_does_not_download_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.cli.main import main

    monkeypatch.chdir(tmp_path)
    for name in ("cifar10", "fashion-mnist"):
        assert main(["data", "check", name, "--data-dir", "sets"]) == DATA
        assert f"paceline data fetch {name} --data-dir sets" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.command import commands_of
    from paceline.cli.main import main

    assert main(["data", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"paceline {name} " in text for name in commands_of("data"))
