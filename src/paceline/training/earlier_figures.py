"""Speed and times of a run whose last attempt had no step to train: taken from what earlier attempts recorded."""

from __future__ import annotations

from typing import Any

from paceline.metrics.recorder import Row, read_rows, seconds_of_steps
from paceline.runs.json_files import RESULTS, read_object
from paceline.training.session import TrainingSession

_OF_TRAINING = (  # fields of results.json that only an attempt with steps can measure
    *("samples_per_second", "training_seconds", "speed_note", "world_size", "strategy", "distributed_training"),
    *("performance", "process_metrics", "limits", "profile", "clocks", "start_up"),
)
_FROM_ROWS = "no step ran in the last attempt: the speed of all steps in metrics.jsonl, without validation"
_OTHER_RANKS = "no step ran in the last attempt, and earlier ones had another number of ranks"
_NO_ROWS = "no step ran in the last attempt, and metrics.jsonl has no times of earlier ones"


def earlier_figures(session: TrainingSession, ranks: list[Row], hashes: dict[str, str]) -> dict[str, Any]:
    """Fields of results.json. Empty if this attempt trained a step, and on all ranks but the primary.

    A run that has ended before has them in results.json. One that was killed before that has its times in
    metrics.jsonl.
    """
    if session.recorder is None or any(entry["samples"] for entry in ranks):
        return {}
    before = read_object(session.folder.results, RESULTS)
    same = {"steps": session.state.step, "weights_sha256": hashes["weights_sha256"]}
    if all(before.get(name) == value for name, value in same.items()):
        return {name: before[name] for name in _OF_TRAINING if name in before}
    rows = read_rows(session.folder.metrics_jsonl)
    return recorded_speed(rows, session.state.step, session.config.train.global_batch_size, session.world.world_size)


def recorded_speed(rows: list[Row], steps: int, global_batch_size: int, world_size: int) -> dict[str, Any]:
    """Speed and time of all steps of the run; None, with the reason, if the rows do not have them."""
    columns = [row.get("ranks", {}).get("samples", []) for row in rows]
    if any(column and len(column) != world_size for column in columns):
        return {"samples_per_second": None, "training_seconds": None, "speed_note": _OTHER_RANKS}
    seconds = seconds_of_steps(rows, global_batch_size)
    if seconds <= 0 or max(row["step"] for row in rows) < steps:
        return {"samples_per_second": None, "training_seconds": None, "speed_note": _NO_ROWS}
    speed = steps * global_batch_size / seconds
    return {"samples_per_second": speed, "training_seconds": seconds, "speed_note": _FROM_ROWS}
