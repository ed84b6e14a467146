"""`paceline.train(on_epoch=...)` calls a function of the caller after every epoch. It may end the run."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.checkpoints.format import step_folders, verify
from paceline.errors import UserError
from paceline.library.epochs import EpochWatch
from paceline.runtime.caller import CALLER_DIR, EpochReports, report_epoch

pytestmark = pytest.mark.long

STEPS_PER_EPOCH = 8
SMALL: dict[str, Any] = {
    "recipe": "synthetic-mlp",
    "num_samples": 640,
    "global_batch_size": 64,
    "processes": 1,
    "track": (),
    "quiet": True,
}


def train(folder: Path, **settings: Any) -> paceline.Run:
    return paceline.train(output_dir=folder, **{**SMALL, **settings})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> paceline.Run:
    """A run that was not ended early."""
    return train(tmp_path_factory.mktemp("whole") / "run", epochs=16)


def test_the_function_is_called_for_every_epoch_in_the_thread_of_the_caller(tmp_path: Path) -> None:
    seen: list[paceline.Epoch] = []
    places = set()

    def note(epoch: paceline.Epoch) -> None:
        seen.append(epoch)
        places.add((os.getpid(), threading.get_ident()))

    run = train(tmp_path / "run", epochs=3, on_epoch=note)
    assert places == {(os.getpid(), threading.get_ident())}
    assert [epoch.number for epoch in seen] == [1, 2, 3]
    assert [epoch.step for epoch in seen] == run.metrics("train").column("step")
    for phase, names in {"train": ("train_loss", "train_accuracy"), "val": ("val_loss", "val_accuracy")}.items():
        for name in names:
            assert [getattr(e, name) for e in seen] == run.metrics(phase).column(name.partition("_")[2])
    assert {epoch.epochs for epoch in seen} == {3}
    assert [e.number for e in seen if e.is_best][-1] == run.results["best_epoch"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[0].number = 7  # type: ignore[misc]
    assert set(dataclasses.asdict(seen[0])["metrics"]) == {"balanced_accuracy", "f1", "top5"}


@pytest.mark.long
def test_without_validation_and_with_a_users_metrics(tmp_path: Path) -> None:
    seen: list[paceline.Epoch] = []
    train(tmp_path / "none", epochs=1, train_split=1.0, on_epoch=seen.append)
    assert (seen[0].val_loss, seen[0].val_accuracy, seen[0].is_best, seen[0].metrics) == (None, None, False, {})
    source = tmp_path / "own.py"
    source.write_text("def zero(logits, labels):\n    return 0.0 * labels.float()\n")
    train(tmp_path / "own", epochs=1, metrics=f"{source}:zero", on_epoch=seen.append)
    assert seen[1].metrics["zero"] == 0.0


@pytest.mark.long
@pytest.mark.parametrize("notice_s", [0, 600])
def test_stop_ends_the_run_with_results_and_the_resumed_run_equals_an_undisturbed_one(
    notice_s: int, whole: paceline.Run, tmp_path: Path
) -> None:
    """Also with a long notice: no scheduler is going to kill the run."""
    seen: list[int] = []

    def stop_after_two(epoch: paceline.Epoch) -> Any:
        seen.append(epoch.number)
        return paceline.STOP if epoch.number == 2 else None

    run = train(tmp_path / "run", epochs=16, notice_s=notice_s, on_epoch=stop_after_two)
    assert seen == [1, 2]
    steps = run.results["steps"]
    assert 2 * STEPS_PER_EPOCH <= steps < 16 * STEPS_PER_EPOCH
    assert run.status == "finished"
    assert run.metrics("test").column("step") == [steps]
    newest = step_folders(run.path / "checkpoints")[0]
    assert max(run.checkpoints().column("step")) == steps
    verify(newest)
    assert run.evaluate().accuracy == run.results["test_accuracy"]
    longer = run.resume(quiet=True)
    assert longer.results["steps"] == 16 * STEPS_PER_EPOCH
    assert longer.results["weights_sha256"] == whole.results["weights_sha256"]
    assert longer.metrics("val").column("loss") == whole.metrics("val").column("loss")


@pytest.mark.long
def test_stop_after_the_last_epoch_changes_nothing(whole: paceline.Run, tmp_path: Path) -> None:
    run = train(tmp_path / "run", epochs=16, on_epoch=lambda epoch: paceline.STOP if epoch.number == 16 else None)
    assert (run.status, run.results["weights_sha256"]) == ("finished", whole.results["weights_sha256"])


@pytest.mark.long
@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_an_exception_stops_the_run_and_reaches_the_caller(
    error: BaseException, whole: paceline.Run, tmp_path: Path
) -> None:
    def fail(epoch: paceline.Epoch) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        train(tmp_path / "run", epochs=16, on_epoch=fail)
    assert caught.value is error
    assert str(tmp_path / "run") in error.__notes__[-1]
    run = paceline.load_run(tmp_path / "run")
    assert run.status in ("preempted", "stopped")  # an error, or Ctrl-C
    assert run.results == {}
    assert run.resume(quiet=True).results["weights_sha256"] == whole.results["weights_sha256"]


@pytest.mark.parametrize("answer", [False, "stop"])
def test_other_return_values_are_refused_and_nothing_is_lost(answer: object, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        train(tmp_path / "run", epochs=16, on_epoch=lambda epoch: answer)
    assert caught.value.got == repr(answer)
    assert "paceline.STOP" in str(caught.value.allowed)
    assert paceline.load_run(tmp_path / "run").checkpoints()[0]["is_complete"]


def test_a_value_that_is_no_function_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="on_epoch"):
        train(tmp_path / "run", on_epoch=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_after_a_restart_the_function_gets_no_epoch_twice(tmp_path: Path) -> None:
    """The run saves only after every fourth epoch, so a restart trains epochs again."""
    seen: list[int] = []

    def note(epoch: paceline.Epoch) -> None:
        seen.append(epoch.number)

    fault = f"kill rank=0 step={6 * STEPS_PER_EPOCH + 1}"
    train(tmp_path / "run", epochs=8, save_epochs=4, train_split=1.0, inject=fault, on_epoch=note)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.long
def test_the_function_may_train(tmp_path: Path) -> None:
    inner: list[paceline.Run] = []

    def train_another(epoch: paceline.Epoch) -> Any:
        inner.append(train(tmp_path / "inner", epochs=1))
        return paceline.STOP

    outer = train(tmp_path / "outer", epochs=60, on_epoch=train_another)
    assert [run.status for run in (outer, *inner)] == ["finished", "finished"]


def test_an_incomplete_line_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = EpochReports(tmp_path)
    assert reports.read_new() == []
    monkeypatch.setenv(CALLER_DIR, str(tmp_path))
    report_epoch({"epoch": 1})
    (file,) = tmp_path.iterdir()
    with file.open("a") as out:
        out.write('{"epoch"')
    assert reports.read_new() == [{"epoch": 1}]
    assert reports.read_new() == []
    with file.open("a") as out:
        out.write(": 2}\n")
    assert reports.read_new() == [{"epoch": 2}]
    monkeypatch.setenv(CALLER_DIR, str(tmp_path / "missing"))
    report_epoch({"epoch": 3})  # the caller has ended: the run continues


def test_ctrl_c_in_the_function_is_not_an_error_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(epoch: paceline.Epoch) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", epochs=60, on_epoch=interrupted)
    assert paceline.load_run(tmp_path / "run").status == "stopped"
    assert EpochWatch(tmp_path, []).error is None
