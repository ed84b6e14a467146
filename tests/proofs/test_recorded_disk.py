"""The recorder records every operation, and the model of a power loss allows the right states."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.power_loss import kills, power_losses, replay
from harness.recorded_disk import Record, Tree, read_tree, recording

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]
CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (\d+)")
NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')


def read_calls(trace: str, root: Path) -> list[list[str]]:
    """From a trace by strace -f -y: every call that changes files below a folder, between the two marks."""
    calls = []
    for line in trace.split("recording-begins", 1)[1].rsplit("recording-ends", 1)[0].splitlines()[1:]:
        found = CALL.match(line)
        if not found or str(root) not in line:
            continue
        call, arguments, result = found.groups()
        names = [Path(name).name for name in NAME.findall(arguments)]
        if call in ("write", "pwrite64"):
            calls.append(["write", result])
        elif call in ("fsync", "fdatasync"):
            calls.append(["fsync"])
        elif call in ("ftruncate", "truncate"):
            calls.append(["truncate", arguments.rpartition(", ")[2]])
        elif call in ("open", "openat", "creat"):
            if "O_CREAT" in arguments:
                calls.append(["create", names[0]])
        elif call in ("unlink", "unlinkat", "rmdir"):
            calls.append(["rmdir" if "AT_REMOVEDIR" in arguments or call == "rmdir" else "unlink", names[0]])
        elif call in ("symlink", "symlinkat"):
            calls.append(["symlink", names[1]])
        else:
            calls.append([call.removesuffix("2").removesuffix("at"), *names])
    return calls


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_recorder_records_the_same_calls_as_strace(disk: Path) -> None:
    """Names, sizes and fsyncs of a complete save, in the same order."""
    folder, output, trace = disk / "run-folder", disk / "record.json", disk / "trace"
    folder.mkdir()
    calls = "creat,truncate,ftruncate,fallocate,copy_file_range,sendfile,splice,fsync,fdatasync,write,pwrite64,writev"
    calls += ",open,openat,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,symlink,symlinkat,link,linkat"
    command = ["strace", "-f", "-y", "-s", "200", "-o", str(trace), "-e", f"trace={calls}", sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command += [str(TESTS / "proofs" / "recorded_child.py"), str(folder), str(output)]
    ran = subprocess.run(command, env=environment, check=False)
    if ran.returncode and not trace.stat().st_size:
        pytest.skip("strace may not trace processes here")
    assert ran.returncode == 0
    recorded = json.loads(output.read_text())
    seen = read_calls(trace.read_text(), folder)
    created = [call for call in recorded if call[0] == "create"]
    # O_CREAT on an existing file does not create it.
    seen = [call for call in seen if call[0] != "create" or call in created]
    assert seen == recorded
    assert len(recorded) > 50


def record_of(disk: Path, action: object) -> Record:
    root = disk / "root"
    root.mkdir()
    with recording(root) as recorder:
        action(root)  # type: ignore[operator]
    assert replay(recorder.record) == read_tree(root)
    return recorder.record


def states(record: Record) -> list[Tree]:
    return [crash.tree for crash in power_losses(record) if crash.point == len(record.operations)]


def test_data_without_fsync_may_be_missing_torn_or_zero(disk: Path) -> None:
    """Contents and names are lost independently of each other."""

    def write(root: Path) -> None:
        (root / "a").write_bytes(b"12345678")

    record = record_of(disk, write)
    possible = [tree for crash in power_losses(record) for tree in [crash.tree]]
    assert possible == [{}, {"a": b""}, {"a": b"12345678"}, {"a": b"1234"}, {"a": bytes(8)}]


def test_fsync_of_a_file_keeps_its_contents_but_not_its_name(disk: Path) -> None:
    """A name is durable after fsync of its folder."""

    def write(root: Path) -> None:
        with (root / "a").open("wb") as file:
            file.write(b"12345678")
            file.flush()
            os.fsync(file.fileno())

    record = record_of(disk, write)
    assert [crash.tree for crash in power_losses(record) if crash.point == 3] == []  # no new states
    last = {tuple(tree.items()) for tree in (crash.tree for crash in power_losses(record))}
    assert () in last


def test_any_subset_of_renames_may_be_lost_until_the_folder_is_fsynced(disk: Path) -> None:
    """Stricter than a journal, which loses the newest changes first."""
    (disk / "before").mkdir()

    def rename_two(root: Path) -> None:
        for name in ("a", "b"):
            (root / name).mkdir()
        descriptor = os.open(root, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        (root / "a").rename(root / "c")
        (root / "b").rename(root / "d")

    record = record_of(disk, rename_two)
    after_fsync = {tuple(crash.tree) for crash in power_losses(record) if crash.point > 3}
    assert after_fsync == {("b", "c"), ("c", "d"), ("a", "d")}
    assert [tuple(crash.tree) for crash in kills(record)] == [(), ("a",), ("a", "b"), ("b", "c"), ("c", "d")]


def test_a_call_that_is_not_modelled_is_refused(disk: Path) -> None:
    """A gap of the recorder is an error, not a missing operation."""

    def truncate(root: Path) -> None:
        (root / "a").write_bytes(b"1")
        os.truncate(root / "a", 0)

    with pytest.raises(NotImplementedError):
        record_of(disk, truncate)
