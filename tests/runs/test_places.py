"""The folder of a start: never over another run, over other files, or to a store that the user has not named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from harness.cli import Answer, command, paceline
from paceline.checkpoints.format import step_folders

QUICK = ["synthetic-mlp", "--num-samples=640", "--global-batch-size=64", "--processes=1", "--track", "--quiet"]


def train(cwd: Path, *flags: str, **extra: str) -> Answer:
    return paceline("train", *QUICK, *flags, cwd=cwd, env=extra)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, except those that reading may leave."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != "run.lock"
    }


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in step_folders(folder / "checkpoints")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs: A of one epoch, B of two, with another seed."""
    folder = tmp_path_factory.mktemp("trained")
    for name, flags in (("A", ["--epochs=1"]), ("B", ["--epochs=2", "--seed=7"])):
        answer = train(folder, *flags, f"--output-dir={name}")
        assert answer.code == 0, answer
    return folder


@pytest.fixture
def workplace(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, symlinks=True)
    return tmp_path


@pytest.mark.parametrize("source", ["A", "A/checkpoints/latest"])
def test_a_run_is_not_continued_into_the_folder_of_another(workplace: Path, source: str) -> None:
    """--resume A --output-dir B, where B is another run: exit code 2, and B is unchanged."""
    before = content(workplace / "B")
    answer = train(workplace, "--epochs=3", f"--resume={source}", "--output-dir=B")
    assert answer.code == 2, answer
    assert "already holds a run" in answer.err
    assert content(workplace / "B") == before


def test_another_launcher_refuses_the_folder_of_another_run(workplace: Path) -> None:
    """The same under torchrun, whose ranks choose the folder."""
    before = content(workplace / "B")
    answer = command(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "paceline"),
        *("train", *QUICK, "--epochs=3", "--resume=A", "--output-dir=B"),
        cwd=workplace,
    )
    assert answer.code != 0, answer
    assert "already holds a run" in answer.err
    assert content(workplace / "B") == before


def test_the_same_command_again_resumes_its_own_run(workplace: Path) -> None:
    """A run that was started from A is resumed, not started from A again."""
    first = train(workplace, "--epochs=2", "--resume=A", "--output-dir=C")
    assert first.code == 0, first
    assert steps(workplace / "C") == [16, 8]
    again = train(workplace, "--epochs=3", "--resume=A", "--output-dir=C")
    assert again.code == 0, again
    assert steps(workplace / "C")[0] == 24
    log = (workplace / "C/logs/rank-0.log").read_text()
    assert ("epochs was 1 when" in log, "epochs was 2 when" in log) == (True, True)
    # After it has resumed itself, it still records its source.
    source = json.loads((workplace / "C/environment.json").read_text())["resumed_from"]
    assert source == str((workplace / "A").resolve())
    assert train(workplace, "--epochs=4", "--resume=B", "--output-dir=C").code == 2


def test_a_run_as_source_and_as_folder_is_resumed(workplace: Path) -> None:
    """--resume A --output-dir A, with any spelling of the path."""
    answer = train(workplace, "--epochs=2", "--resume=A", f"--output-dir={workplace}/B/../A")
    assert answer.code == 0, answer
    assert steps(workplace / "A")[0] == 16


def test_a_run_is_not_continued_into_the_store_of_another(workplace: Path) -> None:
    """The same for a store: --output-dir URL --resume B, where the store has another run."""
    url = f"--output-dir=file://{workplace}/store/run"
    assert train(workplace, "--epochs=1", url).code == 0
    for is_other_machine in (False, True):
        if is_other_machine:
            shutil.rmtree(workplace / "runs")
        before = content(workplace / "store")
        answer = train(workplace, "--epochs=3", url, "--resume=B")
        assert answer.code == 2, answer
        assert "already holds a run" in answer.err
        assert content(workplace / "store") == before


def test_a_rehearsal_of_a_runs_config_has_its_own_folder(workplace: Path) -> None:
    """The config.yaml of a run names the run's folder. A rehearsal does not use that name."""
    (workplace / "gift").mkdir()
    shutil.copy(workplace / "A/config.yaml", workplace / "gift/config.yaml")
    shutil.rmtree(workplace / "A")
    answer = paceline("train", "gift/config.yaml", "--rehearse", "--quiet", cwd=workplace)
    assert answer.code == 0, answer
    assert not (workplace / "A").exists()
    assert len(list((workplace / "runs").glob("gift-rehearsal-*"))) == 1


@pytest.mark.long
def test_a_copy_of_a_mirrored_run_does_not_change_the_store(tmp_path: Path) -> None:
    """Only the working copy of a URL is mirrored. A copy is a separate run, and a message says so."""
    assert train(tmp_path, "--epochs=1", f"--output-dir=file://{tmp_path}/store/run").code == 0
    shutil.copytree(tmp_path / f"runs/file{tmp_path}/store/run", tmp_path / "exp", symlinks=True)
    before = content(tmp_path / "store")
    flags = ("--epochs=2", "--base-lr=0.1", "--output-dir=exp", "--resume=auto")
    answer = paceline("train", *QUICK[:-1], *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "is not mirrored" in answer.out + answer.err
    assert steps(tmp_path / "exp")[0] == 16
    assert content(tmp_path / "store") == before
    pushed = paceline("checkpoints", "exp", "--push", cwd=tmp_path)
    assert pushed.code == 2, pushed
    assert content(tmp_path / "store") == before
    status = json.loads((tmp_path / "exp/status.json").read_text())
    assert "mirror" not in status


@pytest.mark.long
def test_a_forged_mirror_note_causes_no_write(workplace: Path) -> None:
    """A folder from elsewhere names a URL of the user. No file is written there."""
    home = workplace / "home/.ssh"
    home.mkdir(parents=True)
    (workplace / "A/authorized_keys").write_text("a key\n")
    for url in (f"file://{home}", f"local://{home}", "file://../x/y", "://", "file://" + "x" * 5000):
        (workplace / "A/mirror.json").write_text(json.dumps({"url": url, "token": "x"}))
        pushed = paceline("checkpoints", "A", "--push", cwd=workplace)
        assert pushed.code == 2, pushed
    (workplace / "A/mirror.json").write_text(json.dumps({"url": f"file://{home}", "token": "x"}))
    for flags in (["--output-dir=A", "--resume=auto", "--epochs=2"], ["--resume=A", "--epochs=3"]):
        answer = train(workplace, *flags)
        assert answer.code == 0, answer
    assert list(home.iterdir()) == []


@pytest.mark.long
def test_a_failed_resume_does_not_change_a_finished_run(tmp_path: Path) -> None:
    """Data, model and checkpoint are checked before the status of the run changes."""
    model = tmp_path / "own.py"
    build = "import math\nfrom torch import nn\ndef build(num_classes, input_shape):\n"
    model.write_text(build + "    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))\n")
    flags = ("--model-name=own.py:build", "--max-restarts=0")
    assert train(tmp_path, *flags, "--epochs=1", "--output-dir=B").code == 0
    names = ("status.json", "config.yaml", "environment.json", "results.json")
    before = {name: (tmp_path / "B" / name).read_bytes() for name in names}
    model.write_text(build + "    raise ValueError('broken since')\n")
    answer = train(tmp_path, *flags, "--epochs=3", "--resume=B")
    assert answer.code not in (0, 75), answer
    assert "rank 0 failed" in (tmp_path / "B/logs/rank-0.log").read_text()  # not detected before the ranks started
    assert {name: (tmp_path / "B" / name).read_bytes() for name in names} == before


PROJECT = ("config.yaml", "data.json", "results.json", "environment.json", "report.html", "status.json", "metrics.csv")


@pytest.mark.parametrize("flags", [["--resume=auto"], ["--resume=auto", "--load-policy=eager"], []])
def test_a_folder_with_files_of_another_program_is_refused(tmp_path: Path, flags: list[str]) -> None:
    """Also with --resume auto, which finds no run there: exit code 2, and every file stays."""
    for name in PROJECT:
        (tmp_path / "project").mkdir(exist_ok=True)
        (tmp_path / "project" / name).write_text("{}")
    before = content(tmp_path / "project")
    answer = train(tmp_path, "--output-dir=project", *flags)
    assert answer.code == 2, answer
    assert content(tmp_path / "project") == before


def test_a_recipe_with_the_name_of_a_runs_config_is_not_overwritten(tmp_path: Path) -> None:
    """`exp/config.yaml --resume auto`, where exp is no run folder, trains in a separate folder."""
    (tmp_path / "exp").mkdir()
    recipe = tmp_path / "exp" / "config.yaml"
    recipe.write_text("dataset: synthetic\nmodel_name: mlp\nnum_samples: 640\nglobal_batch_size: 64\nepochs: 1\n")
    before = content(tmp_path / "exp")
    answer = paceline("train", "exp/config.yaml", "--resume=auto", "--processes=1", "--quiet", cwd=tmp_path)
    assert answer.code == 0, answer
    assert content(tmp_path / "exp") == before
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "results.json").is_file()


def test_a_run_whose_lock_file_was_deleted_is_resumed(workplace: Path) -> None:
    """Users delete run.lock. environment.json identifies a run folder, also before the first checkpoint."""
    shutil.rmtree(workplace / "A" / "checkpoints")
    (workplace / "A" / "run.lock").unlink()
    answer = train(workplace, "--epochs=1", "--output-dir=A", "--resume=auto")
    assert answer.code == 0, answer
    assert len(steps(workplace / "A")) > 0
