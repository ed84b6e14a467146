"""Data and weights of a job must be on the login node before it is submitted. One command fetches them."""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path

import pytest
import torch

from harness.fake_slurm import FakeSlurm, clean_home
from paceline.cli.main import main
from paceline.data.known_files import (
    CIFAR10_FILES,
    CIFAR10_FOLDER,
    CIFAR10_PICKLED_FILES,
    CIFAR10_PICKLED_FOLDER,
    FASHION_MNIST_FOLDER,
    FASHION_MNIST_MD5,
    FASHION_MNIST_OTHER_FOLDER,
    missing_files,
)
from paceline.models import external, weights
from paceline.models.published import PUBLISHED

USER, DATA = 2, 3
JOB = ("--nodes", "1", "--processes-per-node", "2", "--time", "00:10:00")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def put_files(folder: Path, names: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def hint_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The command in the `try:` line of the screen, as words."""
    screen = capsys.readouterr().err
    line = next(line for line in screen.splitlines() if "try:" in line)
    return shlex.split(line.partition("try:")[2])


def test_a_job_with_missing_data_is_not_submitted_to_fake_slurm(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen names the command that fetches the data, with the recipe and the folder of the request."""
    code = main(["submit", "slurm", "cifar10-cnn", *JOB, "--data-dir", "my data"])
    assert code == DATA
    assert hint_of(capsys) == ["paceline", "data", "fetch", "cifar10-cnn", "--data-dir", "my data"]
    assert fake.calls("sbatch") == []
    assert not (tmp_path / "runs").exists()
    put_files(tmp_path / "my data" / CIFAR10_FOLDER, CIFAR10_FILES)
    assert main(["submit", "slurm", "cifar10-cnn", *JOB, "--data-dir", "my data"]) == 0
    assert len(fake.calls("sbatch")) == 1


def test_a_study_with_missing_data_is_not_submitted_to_fake_slurm(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same check, before a folder of the study is created."""
    study = ["study", "cifar10-cnn", "--on", "slurm", "--world-sizes", "1,2", "--processes-per-node", "1"]
    assert main([*study, "--time", "10"]) == DATA
    assert hint_of(capsys)[:4] == ["paceline", "data", "fetch", "cifar10-cnn"]
    assert fake.calls("sbatch") == []
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize("model", ["resnet18", "vgg19"])
def test_a_job_with_missing_weights_is_not_submitted_to_fake_slurm(
    model: str, fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fetches the weights of the requested model, which may differ from the recipe's."""
    submit = ["submit", "slurm", "shapes-cnn", *JOB, "--model-name", model, "--weights", "imagenet"]
    assert main(submit) == DATA
    words = ["paceline", "data", "fetch", "shapes-cnn", "--weights", "--model-name", model]
    assert hint_of(capsys) == words
    assert fake.calls("sbatch") == []
    put_files(tmp_path / "cache" / "weights", (PUBLISHED[model],))
    assert main(submit) == 0


def test_weights_are_not_checked_for_a_container(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Its home folder is not the one of the login node, so its weights are unknown."""
    submit = ["submit", "slurm", "shapes-cnn", *JOB, "--model-name", "vgg19", "--weights", "imagenet"]
    assert main([*submit, "--container-image", "site/image"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (None, 0), (False, DATA)])
def test_weights_of_a_fake_collection(
    answer: bool | None, code: int, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only missing weights refuse the job. The collections choose the place of their downloads."""
    monkeypatch.setattr("paceline.launch.submission.is_fetched", lambda _: answer)
    monkeypatch.setattr(external, "_check_collection", lambda *_: None)
    submit = ["submit", "slurm", "shapes-cnn", *JOB, "--model-name", "timm:resnet18", "--weights", "imagenet"]
    assert main(submit) == code, capsys.readouterr().err


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing rights for it, or for a folder above it, give one screen. Root can read it, so another user tries."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to read as another user")
    folder = tmp_path / "pictures"
    folder.mkdir()
    tmp_path.chmod(0o700)
    from paceline.data.registry import check_data_config
    from paceline.errors import DataError
    from paceline.settings.schema import DataConfig

    os.seteuid(65534)
    try:
        with pytest.raises(DataError) as caught:
            check_data_config(DataConfig(dataset="folder", data_dir=str(folder)))
    finally:
        os.seteuid(0)
    assert caught.value.got == "Permission denied"


def test_every_layout_of_a_data_set_is_found(tmp_path: Path) -> None:
    """Binary, pickled, the folder itself; plain, gzipped, torchvision's folder. Other data sets are never missing."""
    assert missing_files("cifar10", tmp_path) == list(CIFAR10_FILES)
    put_files(tmp_path / "a" / CIFAR10_FOLDER, CIFAR10_FILES)
    assert missing_files("cifar10", tmp_path / "a") == []
    assert missing_files("cifar10", tmp_path / "a" / CIFAR10_FOLDER) == []
    put_files(tmp_path / "b" / CIFAR10_PICKLED_FOLDER, CIFAR10_PICKLED_FILES)
    assert missing_files("cifar10", tmp_path / "b") == []
    (tmp_path / "b" / CIFAR10_PICKLED_FOLDER / "test_batch").unlink()
    assert missing_files("cifar10", tmp_path / "b") == list(CIFAR10_FILES)
    names = tuple(FASHION_MNIST_MD5)
    assert len(missing_files("fashion-mnist", tmp_path)) == 4
    put_files(tmp_path / FASHION_MNIST_FOLDER, names[:2])
    put_files(tmp_path / FASHION_MNIST_OTHER_FOLDER, (f"{names[2]}.gz",))
    assert missing_files("fashion-mnist", tmp_path) == [f"{names[3]}.gz"]
    for name in ("shapes", "synthetic", "folder", "code.py:data"):
        assert missing_files(name, tmp_path) == []


# --- paceline data fetch ----------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces the publisher's server, with a small file of weights."""
    clean_home(tmp_path, monkeypatch)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "server"
    folder.mkdir()
    torch.save({"fc.weight": torch.zeros(2)}, folder / "net.pth")
    digest = hashlib.sha256((folder / "net.pth").read_bytes()).hexdigest()[:8]
    (folder / "net.pth").rename(folder / f"net-{digest}.pth")
    monkeypatch.setattr(weights, "PUBLISHED_AT", folder.as_uri())
    for name in ("resnet18", "vgg19"):
        monkeypatch.setitem(PUBLISHED, name, f"net-{digest}.pth")
    return folder


def fetched(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache" / "weights").glob("*.pth"))


@pytest.mark.parametrize(
    "words",
    [
        ["shapes-cnn", "--weights", "--model-name", "resnet18"],
        ["--weights", "--model-name=resnet18"],
        ["cifar10-vgg19", "--weights", "--dataset", "shapes"],
    ],
    ids=["recipe with another model", "model alone", "recipe's own model"],
)
def test_weights_are_fetched_once(
    words: list[str], server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their checksum, into the folder that training reads."""
    assert main(["data", "fetch", *words]) == 0, capsys.readouterr().err
    assert "1 tensors in" in capsys.readouterr().out
    assert fetched(tmp_path) == [path.name for path in server.iterdir()]
    for path in server.iterdir():
        path.unlink()
    assert main(["data", "fetch", *words]) == 0, "the second fetch needs no server"


def test_fetch_without_a_connection(server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One screen that names the place for the file."""
    for path in server.iterdir():
        path.unlink()
    assert main(["data", "fetch", "--weights", "--model-name", "resnet18"]) == DATA
    screen = capsys.readouterr().err
    assert screen.startswith("error: could not download")
    assert str(tmp_path / "cache" / "weights" / PUBLISHED["resnet18"]) in screen
    assert fetched(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "a recipe is missing"),
        (["cifar11"], "cifar10"),
        (["shapes-cnn", "cifar10"], "unexpected argument"),
        (["shapes-cnn", "--weights"], "no published ImageNet weights for cnn"),
        (["shapes-cnn", "--weights=imagenet"], "takes no value"),
        (["--weights"], "a recipe is missing"),
        (["gone.yaml"], "gone.yaml"),
    ],
)
def test_wrong_requests(words: list[str], part: str, server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One screen each."""
    assert main(["data", "fetch", *words]) == USER
    screen = capsys.readouterr().err
    assert screen.startswith("error: ")
    assert part in screen


def test_a_recipe_with_generated_data(server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is fetched, and the output says so."""
    assert main(["data", "fetch", "shapes-cnn"]) == 0
    assert "shapes: generated, not downloaded" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["train"], ["plan"], ["train", "--rehearse"], ["bench"]], ids=" ".join)
@pytest.mark.parametrize("recipe", ["cifar10-cnn", "synthetic-mlp --dataset fashion-mnist"])
def test_a_named_data_folder_is_never_created(
    command: list[str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download would fill a mistyped --data-dir. The screen suggests the right folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk" / "datasets").mkdir(parents=True)
    verb, *flags = command
    assert main([verb, *recipe.split(), *flags, "--data-dir", "disk/datsets"]) == DATA
    assert hint_of(capsys) == ["--data-dir", "disk/datasets"]
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "disk", tmp_path / "disk" / "datasets"]


@pytest.mark.parametrize("folder", ["data", "./data", "there"])
def test_a_download_goes_to_the_default_folder_or_an_existing_one(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the name matters here: `plan` downloads nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(["plan", "cifar10-cnn", "--data-dir", folder]) == 0
