"""`paceline checkpoints`: list the checkpoints of a run, and verify them. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.fetch import push
from paceline.checkpoints.named import Listed, list_checkpoints
from paceline.checkpoints.store import list_set_aside, pointed_at
from paceline.cli.command import Command
from paceline.cli.run_view import RunName
from paceline.errors import EXIT_CHECKPOINT, EXIT_FINISHED
from paceline.runs.catalog import locate_run
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.folder import RunFolder, require_run_folder

_LONGEST_WORD = 20
_COLUMNS = ("step", "epoch", "val acc", "val loss", "size", "saved by", "marks", "verdict")
_LEFT_ALIGNED = ("saved by", "marks", "verdict")


@dataclass(frozen=True)
class Checkpoints:
    """List the checkpoints of a run, oldest first. Manifests and sizes are always checked.

    Exit code 4 if one is damaged or cannot be read now. Checkpoints that were set aside earlier are listed too, and do
    not count.
    """

    run: RunName
    """A run folder, or its name in runs/."""
    verify: bool = False
    """Check every bit."""
    json: bool = False
    """Print JSON."""
    push: bool = False
    """Upload the run to its object store again, if the store is behind."""


def checkpoints(settings: Checkpoints) -> int:
    folder = _folder_of(settings.run)
    if settings.push:
        return EXIT_FINISHED if push(RunFolder(folder.parent), say=print) else EXIT_CHECKPOINT
    listed = list_checkpoints(folder, thorough=settings.verify)
    entries = [_describe(item, folder, settings.verify) for item in listed]
    aside = [path.name for path in list_set_aside(folder)]
    if settings.json:
        print(json.dumps({"verified": settings.verify, "checkpoints": entries, "set_aside": aside}, indent=2))
    else:
        _print_table(folder, entries, aside)
    return EXIT_CHECKPOINT if any(item.damage or item.unreadable for item in listed) else EXIT_FINISHED


def _folder_of(run: str) -> Path:
    """The checkpoints folder of a run. The run may be given by that folder, too."""
    path = locate_run(run)
    if path.name == "checkpoints" and path.is_dir():
        return path
    if not (path / "checkpoints").is_dir():
        require_run_folder(path)
    return path / "checkpoints"


def _describe(item: Listed, folder: Path, is_thorough: bool) -> dict[str, Any]:
    """One checkpoint in plain values. Of a damaged one, only what could be read."""
    about = item.manifest.about if item.manifest else {}
    validation = item.state.get("validation")
    validation = validation if isinstance(validation, dict) else {}
    damage = item.damage.damage if item.damage else None
    return {
        "name": item.path.name,
        "step": item.state.get("step"),
        "epoch": _epoch_of(item.state),
        "validation_accuracy": validation.get("accuracy"),
        "validation_loss": validation.get("loss"),
        "size_bytes": item.manifest.size_bytes if item.manifest else None,
        "world_size": about.get("world_size"),
        "strategy": str(about.get("strategy"))[:_LONGEST_WORD] if about else None,
        "is_kept": bool(item.state.get("keep")),
        "is_best": pointed_at(folder, "best") == item.path,
        "is_latest": pointed_at(folder, "latest") == item.path,
        "verdict": _verdict(item, is_thorough),
        "damage": {"file": damage.file, "expected": damage.expected, "got": damage.got} if damage else None,
        "unreadable": str(item.unreadable.got) if item.unreadable else None,
    }


def _verdict(item: Listed, is_thorough: bool) -> str:
    if item.unreadable:
        return "unreadable now"
    return "damaged" if item.damage else "whole" if is_thorough else "sizes agree"


def _epoch_of(state: dict[str, Any]) -> float | None:
    """Completed epochs, with a fraction if the checkpoint is inside an epoch."""
    clock = EpochClock.from_json(state)
    if clock is None:
        return None
    epochs, inside = clock.locate(state["step"])
    return round(epochs + inside / clock.steps_per_epoch, 2)


def _print_table(folder: Path, entries: list[dict[str, Any]], aside: list[str]) -> None:
    if entries:
        rows = [_COLUMNS, *(_row(entry) for entry in entries)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        for row in rows:
            cells = zip(_COLUMNS, row, widths, strict=True)
            line = [cell.ljust(width) if name in _LEFT_ALIGNED else cell.rjust(width) for name, cell, width in cells]
            print("  ".join(line).rstrip())
    else:
        print(f"no checkpoints in {folder}")
    for name in aside:
        print(f"set aside: {name}")
    bad = [entry for entry in entries if entry["damage"]]
    for entry in bad:
        damage = entry["damage"]
        print(f"damaged: {folder / entry['name'] / damage['file']}")
        print(f"  expected {damage['expected']}, got {damage['got']}")
    for entry in entries:
        if entry["unreadable"]:
            print(f"cannot be read now: {folder / entry['name']}: {entry['unreadable']}")
    if bad:
        print(f"{len(bad)} of {len(entries)} damaged; --resume auto continues from the newest complete one")


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    marks = [word for word in ("latest", "best", "kept") if entry[f"is_{word}"]]
    ranks, strategy = _text(entry["world_size"], "{:g}"), ascii(entry["strategy"]).strip("'")
    return (
        str(int(entry["name"].rpartition("-")[2])),
        _text(entry["epoch"], "{:g}"),
        _text(entry["validation_accuracy"], "{:.2%}"),
        _text(entry["validation_loss"], "{:.4f}"),
        _text((entry["size_bytes"] or 0) / 1e6 or None, "{:,.2f} MB"),
        f"{ranks} x {strategy}" if entry["strategy"] else "-",
        ", ".join(marks) or "-",
        entry["verdict"],
    )


def _text(value: object, form: str) -> str:
    """A number as text; a dash for whatever else a file made by others may hold."""
    return form.format(value) if isinstance(value, int | float) else "-"


COMMANDS = (Command("checkpoints", Checkpoints, checkpoints),)
