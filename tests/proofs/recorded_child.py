"""A recorded save in a separate process, for strace: python recorded_child.py FOLDER OUTPUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.recorded_disk import Entries, Record, Sync, Truncate, Write, recording
from proofs.saves import save_a_better_one, two_steps


def calls_of(record: Record) -> list[list[str]]:
    """The system calls of each operation in a trace: their kind, and the names or the number of bytes."""
    calls = []
    for operation in record.operations:
        if isinstance(operation, Entries):
            calls.append([operation.call, *(name for _, name, _ in operation.changes)])
        elif isinstance(operation, Write):
            calls.append(["write", str(len(operation.data))])
        elif isinstance(operation, Truncate):
            calls.append(["truncate", str(operation.size)])
        elif isinstance(operation, Sync):
            calls.append(["fsync"])
    return calls


if __name__ == "__main__":
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    two_steps(folder / "run")
    (folder / "recording-begins").touch()
    with recording(folder) as recorder:
        save_a_better_one(folder / "run", recorder)
    (folder / "recording-ends").touch()
    output.write_text(json.dumps(calls_of(recorder.record)))
