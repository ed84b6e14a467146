"""Real small disks and their faults: tmpfs mounts, for processes in their own mount namespace.

    unshare -rm python disks.py FOLDER SCENARIO

runs a command-line training on such a disk and prints the result as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TRAIN = [
    *("train", "shapes-cnn", "--num-samples=640", "--global-batch-size=64", "--epochs=4", "--log-frequency=1"),
    *("--track", "--save-steps=3", "--keep-last=1", "--processes=2", "--output-dir=run"),
]


def mount_disk(folder: Path, size_mb: int) -> None:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Fill the disk completely."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (2**16, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def is_full(disk: Path) -> bool:
    try:
        (disk / "one more").write_bytes(b"x" * 4096)
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False


def make_read_only(folder: Path) -> None:
    """Mount a read-only view over the folder. A disk with files open for writing cannot be remounted."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)


def train_while(disk: Path, happens: Callable[[], object]) -> dict[str, object]:
    """Run the command like a user. The fault comes soon after its fifth step."""
    errors = disk.parent / "stderr.txt"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "paceline", *TRAIN],
            cwd=disk,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PACELINE_STORAGE_PATIENCE_S": "0"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 5/"):
                happens()
    return {"code": process.returncode, "out": "".join(lines), "screen": errors.read_text()}


if __name__ == "__main__":
    base, scenario = Path(sys.argv[1]) / "disk", sys.argv[2]
    mount_disk(base, 8 if scenario == "eight megabytes" else 24)
    events: dict[str, Callable[[], object]] = {
        "eight megabytes": lambda: None,
        "full": lambda: fill(base),
        "read-only": lambda: make_read_only(base / "run"),
        "deleted": lambda: shutil.rmtree(base / "run", ignore_errors=True),
    }
    print(json.dumps(train_while(base, events[scenario])))
