"""The record of checkpoints is a chain that a resumed run continues."""

from __future__ import annotations

from pathlib import Path

from harness.ranks import make_world
from harness.runs import train_in
from paceline.checkpoints.ledger import Entry, Ledger, hash_entry, hash_stored, read_ledger
from paceline.runs.receipt import NO_HASH, read_receipt

FLAGS = ("--save-steps", "2", "--keep-last", "1", "--device", "cpu")


def require_chain(entries: list[Entry]) -> None:
    previous = NO_HASH
    for entry in entries:
        assert entry["previous"] == previous
        assert hash_entry(entry) == entry["hash"]
        previous = entry["hash"]


def test_a_resumed_run_continues_the_chain(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train_in(make_world(0, 1), str(whole), FLAGS)
    train_in(make_world(0, 1), str(halves), (*FLAGS, "--max-steps", "6"))
    ledger = halves / "checkpoints.jsonl"
    assert [entry["step"] for entry in read_ledger(ledger)] == [2, 4, 6]
    # A process that was killed between the commit of a checkpoint and its record.
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:2]))
    train_in(make_world(0, 1), str(halves), FLAGS, True)
    one, other = (read_ledger(folder / "checkpoints.jsonl") for folder in (whole, halves))
    require_chain(other)
    assert [(entry["step"], entry["tensors"]) for entry in one] == [(row["step"], row["tensors"]) for row in other]
    assert read_receipt(halves / "receipt.json").links["checkpoints"] == other
    assert (whole / "steps.f64").read_bytes() == (halves / "steps.f64").read_bytes()
    newest = halves / "checkpoints" / "step-00000018"
    assert hash_stored(newest) == other[-1]["tensors"]


def test_a_run_that_returns_cuts_off_later_rows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "checkpoints.jsonl")
    (tmp_path / "state.json").write_text("{}")
    for step in (2, 4, 6):
        ledger.add(tmp_path, {"model": f"{step}"}, {"step": step})
    before = read_ledger(tmp_path / "checkpoints.jsonl")
    ledger.cut_after(4)
    ledger.add(tmp_path, {"model": "7"}, {"step": 7})
    after = read_ledger(tmp_path / "checkpoints.jsonl")
    require_chain(after)
    assert after[:2] == before[:2]
    assert [entry["step"] for entry in after] == [2, 4, 7]
