"""The script that compares with timm on Tiny ImageNet: arguments, layout, clock. Its training needs a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.launch.request import read_request

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tiny_imagenet.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_imagenet", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_imagenet"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def published(tmp_path: Path) -> Path:
    root = tmp_path / "tiny-imagenet-200"
    for wnid in ("n01", "n02"):
        (root / "train" / wnid / "images").mkdir(parents=True)
        for number in range(3):
            (root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG").touch()
    (root / "val" / "images").mkdir(parents=True)
    lines = [f"val_{number}.JPEG\t{wnid}\t0\t0\t9\t9" for number, wnid in enumerate(("n02", "n01"))]
    for line in lines:
        (root / "val" / "images" / line.split("\t")[0]).touch()
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


def test_without_a_gpu_it_says_so_in_one_line(published: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(published), "--parts", "full"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "this benchmark needs a GPU\n"


@pytest.mark.parametrize("flags", [(), ("--parts", "speed"), ("--parts", "full", "--epochs", "1"), ("--seeds", "x")])
def test_wrong_arguments_end_before_anything_starts(script: ModuleType, flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        script.parse(["data", *flags])
    assert ended.value.code == 2


def test_what_is_missing_is_named(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = script.parse([str(tmp_path), "--parts", "full"])
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert "timm" in script.missing(given, lambda: True)
    monkeypatch.setattr(script, "find_spec", lambda name: object())
    assert "val_annotations.txt" in script.missing(given, lambda: True)


def test_the_published_layout_is_arranged_for_both(script: ModuleType, published: Path, tmp_path: Path) -> None:
    target = tmp_path / "arranged"
    script.arrange(published, target)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*.JPEG"))
    assert found[:2] == ["test/n01/val_1.JPEG", "test/n02/val_0.JPEG"]
    assert len(found) == 2 + 6 + 2
    assert all(path.exists() for path in target.rglob("*.JPEG"))
    assert script.count_pictures(target) == 6
    given = script.parse([str(published), "--timm-train", "train.py"])
    for command in (
        script.paceline_command(given, published, "a", 1, 30),
        script.paceline_command(given, published, "a", 1, 30, is_augmented=False),
        script.full_command(given, published, 1),
    ):
        flags = [flag for flag in command[5:] if not flag.startswith(("--data-dir", "--model-name"))]
        read_request("tiny-imagenet-resnet18", [*flags, f"--data-dir={target}"])  # every flag is known, and they fit


def test_the_clock_counts_from_the_first_epoch_to_the_last(script: ModuleType, tmp_path: Path) -> None:
    """The trainer is a fake: it writes the file of epochs as Paceline does."""
    folder = tmp_path / "out" / "run"
    trainer = tmp_path / "fake_trainer.py"
    trainer.write_text(f"""
import pathlib, time
folder = pathlib.Path({str(folder)!r}); folder.mkdir()
text = "epoch,phase,loss,accuracy,throughput\\n"
for epoch in (1, 2, 3):
    text += f"{{epoch}},train,1,0.1,9\\n{{epoch}},val,1,0.{{epoch}},9\\n"
    (folder / "metrics.csv").write_text(text)
    time.sleep(0.5)
""")
    found = script.watch([sys.executable, str(trainer)], folder, script.paceline_epochs, 100)
    assert found.accuracy == 0.3
    assert 20 < found.images_per_s <= 220  # two epochs in at least a second; a loaded machine takes longer
    (folder / "summary.csv").write_text("epoch,train_loss,eval_loss,eval_top1\n0,5,4,12.5\n")
    assert script.timm_epochs(folder) == [0.125]


def test_intervals(script: ModuleType) -> None:
    assert script.interval([0.5]) == (0.5, 0.0)
    mean, half = script.interval([1.0, 2.0, 3.0])
    assert (mean, round(half, 3)) == (2.0, 2.484)
