"""The start of a run: --init-from, load policies, best-is-latest, named checkpoints, changed configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline
from harness.runs import read_results, step_losses
from paceline.checkpoints.format import step_folders
from paceline.checkpoints.store import open_checkpoint
from paceline.metrics.recorder import read_rows

pytestmark = pytest.mark.long

QUICK = ["--num-samples=640", "--global-batch-size=64", "--log-frequency=1", "--processes=1", "--track", "--epochs=3"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `shapes-cnn` was trained for three epochs of nine steps, all checkpoints kept."""
    folder = tmp_path_factory.mktemp("workplace")
    answer = paceline("train", *QUICK, "--keep-every-epochs=1", "--save-steps=5", "--keep-last=9", cwd=folder)
    assert answer.code == 0, answer
    return folder


def only_run(workplace: Path) -> Path:
    (folder,) = (workplace / "runs").glob("shapes-cnn-*")
    return folder


def test_checkpoints_are_saved_at_the_requested_steps(workplace: Path) -> None:
    steps = [int(path.name.removeprefix("step-")) for path in step_folders(only_run(workplace) / "checkpoints")]
    assert steps == [27, 25, 20, 18, 15, 10, 9, 5]


def test_a_named_checkpoint_is_resumed_in_a_new_folder_with_its_history(workplace: Path, tmp_path: Path) -> None:
    source = only_run(workplace) / "checkpoints" / "step-00000010"
    answer = paceline("train", *QUICK, "--resume", str(source), "--output-dir", "again", cwd=tmp_path)
    assert answer.code == 0, answer
    assert "at step 10" in answer.out
    assert step_losses(tmp_path / "again") == step_losses(only_run(workplace))
    hashes = [read_results(path)["weights_sha256"] for path in (tmp_path / "again", only_run(workplace))]
    assert hashes[0] == hashes[1]
    epochs = [row["epoch"] for row in read_rows(tmp_path / "again" / "metrics.jsonl") if row.get("phase") == "val"]
    assert epochs == [1, 2, 3]


def test_eager_uses_an_earlier_run_and_fresh_does_not(workplace: Path) -> None:
    before = {path.name for path in (workplace / "runs").iterdir()}
    flags = ["--resume=auto", "--max-steps=28", "--epochs=4"]
    eager = paceline("train", *QUICK, *flags, "--load-policy=eager", "--output-dir=runs/eager", cwd=workplace)
    assert eager.code == 0, eager
    assert "at step 27" in eager.out
    eager_best, best = (workplace / path / "checkpoints" / "best" for path in ("runs/eager", only_run(workplace)))
    assert open_checkpoint(eager_best).step == open_checkpoint(best).step  # copied
    fresh = paceline("train", *QUICK, "--resume=auto", "--max-steps=2", "--output-dir=runs/fresh", cwd=workplace)
    assert fresh.code == 0, fresh
    assert "resumed" not in fresh.out
    none = paceline(
        *("train", *QUICK, "--resume=auto", "--load-policy=none", "--max-steps=1", "--output-dir=runs/none"),
        cwd=workplace,
    )
    assert none.code == 0, none
    assert "resumed" not in none.out
    assert {path.name for path in (workplace / "runs").iterdir()} == before | {"eager", "fresh", "none"}


def test_best_is_latest(workplace: Path) -> None:
    run = only_run(workplace)
    best = open_checkpoint(run / "checkpoints" / "best").step
    answer = paceline(
        *("train", *QUICK, "--resume", str(run), "--best-is-latest", "--output-dir=elsewhere", "--max-steps=27"),
        cwd=workplace,
    )
    assert answer.code == 0, answer
    assert f"at step {best} " in answer.out


def test_init_from_starts_a_new_run_from_matching_weights(workplace: Path, tmp_path: Path) -> None:
    answer = paceline(
        *(
            "train",
            "synthetic-mlp",
            "--dataset=synthetic",
            "--input-size=3x32x32",
            "--num-classes=4",
            "--model-name=cnn",
        ),
        *("--num-samples=640", "--global-batch-size=64", "--processes=2", "--track", "--max-steps=1"),
        *("--init-from", str(only_run(workplace)), "--output-dir=new"),
        cwd=tmp_path,
    )
    assert answer.code == 0, answer
    assert "weights   8 of 10 tensors" in answer.out
    assert answer.out.count("other shape") == 2
    assert read_results(tmp_path / "new")["steps"] == 1


def test_wrong_starting_points(workplace: Path, tmp_path: Path) -> None:
    run = str(only_run(workplace))
    for flags, code, part in [
        (["--init-from=nowhere"], 2, "no weights to start from"),
        ([f"--init-from={run}", f"--resume={run}"], 2, "--init-from"),
        ([f"--init-from={run}", "--model-name=mlp"], 3, "does not belong to this model"),
        ([f"--resume={run}", "--output-dir=x", "--global-batch-size=32"], 4, "global_batch_size: saved 64, now 32"),
        (
            [f"--resume={run}", "--output-dir=y", "--dataset=synthetic", "--input-size=3x32x32"],
            4,
            "dataset: saved 'shapes'",
        ),
    ]:
        answer = paceline("train", *QUICK, *flags, cwd=tmp_path)
        assert answer.code == code, answer
        assert part in answer.err
        assert "Traceback" not in answer.err


def test_changes_that_keep_the_result_are_noted(workplace: Path, tmp_path: Path) -> None:
    run = str(only_run(workplace))
    answer = paceline("train", *QUICK, f"--resume={run}", "--output-dir=z", "--num-workers=1", cwd=tmp_path)
    assert answer.code == 0, answer
    assert "note: num_workers was 2 when the checkpoint was saved, is 1 now" in answer.out
