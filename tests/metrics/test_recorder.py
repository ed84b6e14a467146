"""metrics.jsonl is the source. Derived files never have a row twice."""

from __future__ import annotations

from pathlib import Path

from paceline.metrics.recorder import Recorder, read_rows
from paceline.runs.folder import RunFolder


def folder_in(path: Path) -> RunFolder:
    folder = RunFolder(path / "run")
    folder.create()
    return folder


def record_epochs(folder: RunFolder, first: int, last: int, *, resume_step: int) -> None:
    recorder = Recorder(folder, resume_step=resume_step)
    for epoch in range(first, last + 1):
        recorder.step(10 * epoch, loss=float(epoch))
        for phase in ("train", "val"):
            recorder.epoch(10 * epoch, epoch=epoch, phase=phase, loss=1 / epoch, accuracy=0.5, throughput=7.0)
    recorder.close()


def test_csv_has_exactly_the_documented_columns(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    record_epochs(folder, 1, 2, resume_step=0)
    lines = folder.metrics_csv.read_text().splitlines()
    assert lines[0] == "epoch,phase,loss,accuracy,throughput"
    assert lines[1:] == [
        "1,train,1.0,0.5,7.0",
        "1,val,1.0,0.5,7.0",
        "2,train,0.5,0.5,7.0",
        "2,val,0.5,0.5,7.0",
    ]


def test_resume_removes_rows_after_the_resumed_step(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    record_epochs(folder, 1, 4, resume_step=0)
    record_epochs(folder, 3, 4, resume_step=20)
    csv = folder.metrics_csv.read_text()
    assert csv.count("\n3,train") == csv.count("\n4,val") == 1
    assert [row["step"] for row in read_rows(folder.metrics_jsonl) if row["kind"] == "step"] == [
        10,
        20,
        30,
        40,
    ]


def test_a_line_truncated_by_a_crash_is_ignored(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    record_epochs(folder, 1, 1, resume_step=0)
    with folder.metrics_jsonl.open("a") as file:
        file.write('{"kind": "step", "st')
    assert len(read_rows(folder.metrics_jsonl)) == 3
    record_epochs(folder, 2, 2, resume_step=10)
    assert len(read_rows(folder.metrics_jsonl)) == 6


def test_a_second_test_row_replaces_the_first(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    for _ in range(2):
        recorder = Recorder(folder, resume_step=50)
        recorder.epoch(50, epoch=5, phase="test", loss=0.1, accuracy=0.9, throughput=1.0)
        recorder.close()
    assert folder.metrics_csv.read_text().count("test") == 1
