"""Every `paceline` command of the README, the docs, the course and the examples is executed.

A command that takes seconds is executed as it is. A command that would train for minutes or go to a cluster is checked
by its own --dry-run, with every flag, path and rule. A command that measures gets a small size. NOT_EXECUTED has the
reason for each command that cannot be executed here.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from harness import documents
from harness.archive_files import make_pictures, pictures_of, write_webdataset, write_zip
from harness.cli import paceline
from harness.documents import REPOSITORY, Command
from harness.task_data import write_pictures
from paceline.cli.main import main
from paceline.runs.folder import RunFolder

pytestmark = [pytest.mark.docs]

SMALL = ["--num-samples", "640", "--global-batch-size", "64"]
# The beginning of a command, and flags that make it fast. The first match is used.
QUICKLY: list[tuple[str, list[str]]] = [
    ("train shapes-cnn --json", ["--epochs", "1", *SMALL]),
    ("train folder-resnet50", ["--global-batch-size", "4", "--dry-run"]),
    ("train finetune", ["--global-batch-size", "4", "--dry-run"]),
    ("train imagenet-resnet50", ["--global-batch-size", "4", "--dry-run"]),
    ("train tiny-imagenet-resnet18", ["--global-batch-size", "4", "--dry-run"]),
    ("train", ["--dry-run"]),
    ("submit", ["--dry-run"]),
    ("study collect", []),
    ("study predict", []),
    ("study", ["--dry-run"]),
    ("sweep", ["--dry-run"]),
    ("clean", ["--dry-run"]),
    ("find-lr", ["--steps", "10", *SMALL]),
    ("bench --profile", ["--seconds-per-size", "0.02", *SMALL]),
    ("bench --what", ["--sizes", "4KB:8KB", "--seconds-per-size", "0.02", *SMALL]),
    # Without them, only the data part of bench is left.
    ("bench", ["--what", "data", "--seconds-per-size", "0.02", *SMALL]),
    ("equivalence", ["--world-sizes", "1,2", "--max-steps", "2", *SMALL]),
]
# These train to the end.
FOR_REAL = {
    'train shapes-cnn --num-samples 4000 --epochs 3 --save-steps 20 --inject "kill rank=1 step=30"',
    "train shapes-cnn --model-name my_model.py:build --rehearse",
    "train shapes-cnn --dataset my_data.py:make_dataset --epochs 2",
    "train shapes-cnn --dataset my_angles.py:make_dataset --task regression --epochs 2",
}
# Commands with another correct exit code than 0.
ENDINGS = {
    "course check": 1,  # an exercise with gaps
}
_GPU = "needs a GPU; `pytest -m gpu`"
_DOWNLOAD = "downloads CIFAR-10; tests/data/test_fetch.py has a server of its own"
_STORE = "needs a bucket; tests/checkpoints/test_object_stores.py starts a server"
_STORE_DATA = "needs a bucket; tests/data/test_s3_data.py starts a server"
_SLURM = "needs Slurm; tests/integrations/slurm runs it on a real cluster"
_EXTRA = "needs an extra; make test-extras"
_MINUTE = "the same checks as plain `doctor`, another output; tests/tools/doctor/test_doctor.py"
_TRUST = "needs a run of the page; tests/tools/trust runs it"
NOT_EXECUTED = {
    "verify runs/shapes --steps 5": _TRUST,
    "sign runs/shapes --key ~/.ssh/id_ed25519": _TRUST,
    "verify runs/shapes --signers anna.pub": _TRUST,
    "replay runs/shapes --without 739,896,1830,2676 --processes 2 --output-dir runs/shapes-without": _TRUST,
    "inspect runs/shapes --step 100": _TRUST,
    "bisect runs/a runs/b": _TRUST,
    "bench cifar10-resnet18 --data-dir data": _DOWNLOAD,
    "data fetch cifar10 --data-dir data": _DOWNLOAD,
    "data fetch cifar10-vgg19 --weights --data-dir data": _DOWNLOAD,
    "data fetch cifar10-vgg19 --weights --data-dir /scratch/data": _DOWNLOAD,
    "data fetch folder-resnet50 --weights": "downloads weights; tests/data/test_fetch.py has a server of its own",
    "doctor --device cuda": _GPU,
    "doctor --device cuda --output-dir /scratch/runs": _GPU,
    "doctor --json": _MINUTE,
    "doctor --launch slurm": _SLURM,
    "doctor --launch slurm --nodes 2 -- --gpus-per-node=4": _SLURM,
    "doctor --launch slurm --nodes 4": _SLURM,
    "doctor --launch slurm --nodes 4 -- --partition=gpu --gpus-per-node=4": _SLURM,
    "doctor --launch slurm --nodes 4 --processes 2 -- --partition=debug --time=5": _SLURM,
    "export RUN --format onnx": _EXTRA,
    "train cifar10-cnn --output-dir s3://bucket/runs/first": _STORE,
    "train cifar10-resnet18 --output-dir s3://my-bucket/night/resnet18": _STORE,
    "train cifar10-resnet18 --output-dir s3://my-bucket/night/resnet18 --resume auto": _STORE,
    "plan imagenet-resnet50 --data-dir s3://BUCKET/imagenet --cache-gb 160": _STORE_DATA,
    "train imagenet-resnet50 --data-dir s3://BUCKET/imagenet --cache-gb 160": _STORE_DATA,
    "train cifar10-swin --data-dir data": _EXTRA,
    "train cifar10-timm --data-dir data": _EXTRA,
    "train cifar10-timm --model-name timm:convnext_tiny --data-dir data": _EXTRA,
}
# Placeholders for the reader's own values.
STAND_INS = {
    "RUN": "runs/first",
    "RUN/config.yaml": "runs/first/config.yaml",
    "/scratch/data": "data",
    "proxy": "runs/first",
    "RECIPE": "shapes-cnn",
    "PICTURE...": "PICTURES/red/0.png",
    "IMAGE": "registry.example/paceline:1",
    "REGISTRY": "registry.example",
    "CLAIM": "runs",
    "...": "--image registry.example/paceline:1 --runs runs --nodes 2 --processes-per-node 2",
    "PATH": "page.html",
    "studies/shapes-cnn": "studies/measured",
    "runs/pictures": "runs/second",
    "runs/backbone": "runs/first",
    "runs/tuned": "runs/first",
    "runs/small-net": "runs/second",
    "runs/one-gpu": "studies/measured/cells/ddp-1-r1",
    "runs/two-gpus": "studies/measured/cells/ddp-2-r1",
    "runs/four-gpus": "runs/first",
}


def _documented() -> list[Command]:
    """Each command once, at its first occurrence."""
    first: dict[str, Command] = {}
    for page in documents.pages():
        for command in documents.commands(page):
            first.setdefault(command.text, command)
    return list(first.values())


DOCUMENTED = _documented()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages use: a finished run, pictures, and the files they show."""
    folder = tmp_path_factory.mktemp("desk")
    one_epoch = ["--epochs", "1", *SMALL]
    run = paceline("train", "shapes-cnn", *one_epoch, "--processes", "2", "--output-dir", "runs/first", cwd=folder)
    assert run.code == 0, run.err
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "second", symlinks=True)
    cells = ["--world-sizes", "1,2", "--repeats", "1", "--epochs", "1", "--num-samples", "2000"]
    study = paceline("study", "shapes-cnn", *cells, "--output-dir", "studies/measured", cwd=folder)
    assert study.code == 0, study.err
    for number, colour in enumerate(["red", "blue"]):
        for half in range(5):
            path = folder / "PICTURES" / colour / f"{half}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), (200, 40 * number, 10 * half)).save(path)
    for name, label in {"TAGGED": "sea;people", "MEASURED": "0.5"}.items():
        (folder / name).mkdir()
        pairs = [(f"{number}.png", label) for number in range(60)]
        write_pictures(folder / name, {"train.csv": pairs[:50], "test.csv": pairs[50:]})
    _write_large_sets(folder)
    packed = paceline("data", "pack", "PICTURES", "PACKED", cwd=folder)
    assert packed.code == 0, packed.err
    for page in documents.pages():
        for block in documents.blocks(page):
            if block.language == "python" and (title := re.match(r"# (\w+\.py)\n", block.text)):
                (folder / title[1]).write_text(block.text)
    drawn = subprocess.run([sys.executable, "make_pictures.py"], cwd=folder, check=False, timeout=60)
    assert drawn.returncode == 0
    # The times of a course, in the columns of that course.
    times = {1: 7.4, 2: 4.6, 4: 2.2}
    rows = [f"ddp,{gpus},{epoch},{time},0.9,70,100" for gpus, time in times.items() for epoch in (1, 2)]
    table = "\n".join(["method,gpus,epoch,time,val_loss,acc,peak_mem", *rows]) + "\n"
    (folder / "results.csv").write_text(table)
    return folder


def _write_large_sets(folder: Path) -> None:
    """Small sets in the layouts of large ones: WebDataset, zip, CSV files, ImageNet, Tiny ImageNet."""
    parts = make_pictures(folder / "made", {"train": 10, "val": 3})
    write_webdataset(parts, folder / "DATA")
    write_zip(parts, folder / "pictures.zip")
    shutil.copytree(parts, folder / "LISTED")
    for part, name in (("train", "train"), ("val", "test")):
        paths = [path.relative_to(parts) for path in pictures_of(parts / part)]
        lines = ["path,label", *(f"{path},{path.parts[1]}" for path in paths)]
        (folder / "LISTED" / f"{name}.csv").write_text("\n".join(lines) + "\n")
    shutil.copytree(parts, folder / "IMAGENET")
    for picture in pictures_of(parts):
        part, label, name = picture.relative_to(parts).parts
        to = folder / "tiny-imagenet-200" / (Path(part, label) if part == "train" else Path(part)) / "images"
        to.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, to / f"{label}-{name}")
        if part == "val":
            with (to.parent / "val_annotations.txt").open("a") as table:
                table.write(f"{label}-{name}\t{label}\t0\t0\t9\t9\n")


@pytest.mark.parametrize(
    "command", [c for c in DOCUMENTED if c.text not in NOT_EXECUTED], ids=lambda c: f"{c.page}:{c.line}"
)
def test_a_command_of_a_page_works(command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = (REPOSITORY / command.page).parent if command.page.startswith("examples/") else desk
    words = _with_stand_ins(command.words)
    if command.text not in FOR_REAL:
        words += next(
            (more for start, more in QUICKLY if command.text.startswith(start) and more[:1] != words[-1:]), []
        )
    expected = next((code for start, code in ENDINGS.items() if command.text.startswith(start)), 0)

    if (words[0] == "train" and "--dry-run" not in words) or words[0] in ("bench", "equivalence", "doctor", "course"):
        answer = paceline(*words, cwd=where)  # starts its own processes
        code, said = answer.code, answer.out + answer.err
    else:
        monkeypatch.chdir(where)
        code, said = _here(words)

    assert code == expected, f"{command.page}:{command.line}: paceline {' '.join(words)}\n{said}"


def _with_stand_ins(words: list[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        if found[-1:] == ["--output-dir"]:
            found.append(word)  # a new folder
        elif word == "RUN" and STAND_INS["RUN"] in found:
            found.append("runs/second")
        elif re.fullmatch(r"runs/\S+-\d{8}-\d{6}", word):
            found.append(STAND_INS["RUN"])
        elif word in STAND_INS:
            found += STAND_INS[word].split()
        else:
            found.append(re.sub(r"\b(REGISTRY|PATH)\b", lambda name: STAND_INS[name[0]], word))
    return found


def _here(words: list[str]) -> tuple[int, str]:
    """Run in this process, because torch is imported already."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    return code, said.buffer.getvalue().decode()  # type: ignore[attr-defined]


def test_every_exception_is_still_in_a_page() -> None:
    documented = {command.text for command in DOCUMENTED}

    assert sorted(set(NOT_EXECUTED) - documented) == []
    assert sorted(FOR_REAL - documented) == []


def test_every_file_of_a_run_is_in_the_reference(desk: Path) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (REPOSITORY / "docs/reference/files.md").read_text(), re.MULTILINE)
    found = [path for path in RunFolder(desk / "runs" / "first").path.iterdir() if not path.name.startswith(".")]

    assert found
    assert [path.name for path in found if path.name not in rows and f"{path.name}/" not in rows] == []
