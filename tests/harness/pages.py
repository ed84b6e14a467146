"""Content for test pages: charts of every kind, and the files of a run with a failure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from paceline.reports.charts import Chart, Mark, Matrix, Series, Table
from paceline.reports.page import Code, Details, Gallery, Picture, Section, Tile, Tiles
from paceline.runs.folder import RunFolder
from paceline.settings.load import load_config, to_yaml

HOSTILE = '</script><img src=x onerror="alert(1)"><b>name & `co'
CLASSES = ["disc", "ring", "crescent", "square", "triangle", "star", "cross", "heart", "arrow", "bars"]
# One red pixel.
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def every_chart() -> list[Chart | Matrix]:
    """Lines with gaps, marks, bands and whiskers, both kinds of bars, a matrix; linear and logarithmic."""
    steps = list(range(1, 5001))
    loss: list[float | None] = [2.3 * math.exp(-step / 900) + 0.05 * math.sin(step) + 0.1 for step in steps]
    loss[2000:2050] = [None] * 50
    loss[3000] = 1.9
    worlds = [1, 2, 4, 8]
    speed_up = [
        Series("DDP", [1, 1.9, 3.5, 6.2], worlds, low=[1, 1.8, 3.2, 5.9], high=[1, 2, 3.8, 6.5], has_points=True),
        Series("FSDP", [1, 1.7, None, 5.0], worlds, has_points=True),
        Series("ideal", worlds, worlds, is_dashed=True),
    ]
    band = Series("mean", [2, 1.5, 1.2, 1], [1, 2, 3, 4], low=[1.8, 1.3, 1.1, 0.9], high=[2.2, 1.7, 1.3, 1.1])
    parts = ["one process", "two processes", "four processes"]
    stack = [Series(name, y, parts) for name, y in {"forward": [0.01, 0.011, 0.012], "wait": [0, 0.004, 0.009]}.items()]
    memory = [Series("DDP", [8e9, 8.1e9], ["1", "2"]), Series("FSDP", [8e9, 4.2e9], ["1", "2"])]
    counts = [[190 if i == j else (i * j) % 7 for j in range(10)] for i in range(10)]
    return [
        Chart(
            *("loss", "Loss", "step", "loss", [Series("train", loss, steps), Series(HOSTILE, [2.0, 1.0], [1, 5000])]),
            marks=[Mark(2100, "rank 1 failed")],
            wide=True,
        ),
        Chart(
            "speed", "Speed-up", "ranks", "speed-up", speed_up, x_log=True, y_log=True, x_ticks=worlds, note="A note."
        ),
        Chart("band", "Band", "epoch", "loss", [band]),
        Chart("one", "One point", "epoch", "accuracy", [Series("a", [0.5], [1])], y_format="percent"),
        Chart("stack", "Time", "ranks", "per step", stack, kind="stacked-bar", y_format="seconds"),
        Chart("bars", "Memory", "ranks", "per rank", memory, kind="bar", y_format="bytes"),
        Matrix("matrix", "Confusion matrix", CLASSES, counts),
        Chart("empty", "Nothing yet", "epoch", "loss", [Series("a", [], [])]),
    ]


def every_block() -> list[Section]:
    tiles = Tiles(
        [Tile("test accuracy", "99.15%", "loss 0.035", "good"), Tile("ranks", "2"), Tile(HOSTILE, HOSTILE, HOSTILE)]
    )
    table = Table(["name", "count", HOSTILE], [["b", 3, "10%"], ["a", 20000, "9%"], [HOSTILE, 1.5, None]], HOSTILE)
    return [
        Section("Figures", [tiles, "Some **bold** words, `code`, a link to [the table](#tables), and " + HOSTILE]),
        Section("Charts", every_chart()),
        Section("Tables", [table, Code(HOSTILE), Gallery([Picture(PIXEL, HOSTILE, HOSTILE, "a note", "bad")])]),
        Section(
            HOSTILE, [Details("Folded", [Chart("folded", "Inside", "x", "y", [Series("a", [1, 2], [1, 2])])])], "more"
        ),
    ]


def write_run(path: Path, *, state: str = "finished", name: str = "cnn") -> RunFolder:
    """Invented files of a run: 4 epochs of 25 steps, one restart."""
    folder = RunFolder(path)
    folder.create()
    flags = ["--epochs=4", "--base-lr=0.1", "--seed=7", f"--model-name={name}"]
    folder.config.write_text(to_yaml(load_config("shapes-cnn", flags).config))
    folder.write_status(state, step=100, **({} if state == "finished" else {"reason": "the disk is full"}))
    _write(
        folder.environment, {"paceline": "0.1.0", "python": "3.12", "packages": {"torch": "2.13"}, "command": ["train"]}
    )
    rows: list[dict[str, Any]] = []
    for step in range(5, 101, 5):
        values = {"loss": 2.3 * 0.98**step, "accuracy": step / 120, "lr": 0.1 - step / 1000, "throughput": 3000 + step}
        rows.append(
            {"kind": "step", "step": step, **values, "data_wait": 0.05, "memory_mb": 400, "memory_peak_mb": 420}
        )
        rows[-1]["grad_norm"] = 1.0 + 1 / step
        if step % 25 == 0:
            for phase in ("train", "val"):
                values = {"loss": 2.3 * 0.98**step, "accuracy": step / 110, "throughput": 3000}
                rows.append({"kind": "epoch", "step": step, "epoch": step // 25, "phase": phase, **values})
    folder.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    failure = {"attempt": 1, "rank": 1, "step": 60, "what": "rank 1 was ended by SIGKILL", "lost_steps": 10}
    failure |= {
        "time": "2026-01-02T03:04:05.678+00:00",
        "done": "started again from step 50",
        "traceback": "Traceback: x",
    }
    folder.failures.write_text(json.dumps(failure) + "\n")
    folder.faults.write_text(json.dumps({"what": "kill (rank 1, step 60)", "rank": 1, "attempt": 1}) + "\n")
    if state == "finished":
        _write(folder.results, _results())
        rows = [{"true": "disc", "predicted": name, "confidence": 0.9, "picture": PIXEL} for name in ("ring", "disc")]
        _write(folder.examples, {"examples": rows})
    return folder


def _results() -> dict[str, Any]:
    ranks = [{"rank": n, "host": "h", "device": "cpu", "samples": 800, "samples_per_second": 1500.5} for n in (0, 1)]
    counts = [[18 if i == j else 2 if (i + 1) % 10 == j else 0 for j in range(10)] for i in range(10)]
    return {
        **{"status": "finished", "test_accuracy": 0.9, "test_loss": 0.3, "best_epoch": 3, "steps": 100},
        **{"samples_per_second": 3001.0, "training_seconds": 68.2, "world_size": 2, "strategy": "ddp"},
        "weights_sha256": "ab" * 32,
        "distributed_training": {"backend": "gloo", "epochs": 4, "precision": "float32"},
        "process_metrics": ranks,
        "model_info": {"parameters": 553514},
        "test": {"samples": 200, "class_accuracy": dict.fromkeys(CLASSES, 0.9), "confusion_matrix": counts},
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
